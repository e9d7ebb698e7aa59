package extproc

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvmesh/kvmesh/internal/names"
)

// headerOption is one header to set.
type headerOption = *corev3.HeaderValueOption

// header sets a header over whatever is there.
func header(name, value string) headerOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// pass answers a message by leaving its phase alone. Each phase has its own kind
// of answer; one of another kind makes Envoy fail the request as spurious.
func pass(req *extprocv3.ProcessingRequest) (*extprocv3.ProcessingResponse, error) {
	switch req.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_RequestHeaders:
		return continueHeaders(nil), nil
	case *extprocv3.ProcessingRequest_RequestBody:
		return continueBody(nil), nil
	case *extprocv3.ProcessingRequest_RequestTrailers:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestTrailers{
			RequestTrailers: &extprocv3.TrailersResponse{},
		}}, nil
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseHeaders{
			ResponseHeaders: &extprocv3.HeadersResponse{},
		}}, nil
	case *extprocv3.ProcessingRequest_ResponseBody:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseBody{
			ResponseBody: &extprocv3.BodyResponse{},
		}}, nil
	case *extprocv3.ProcessingRequest_ResponseTrailers:
		return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ResponseTrailers{
			ResponseTrailers: &extprocv3.TrailersResponse{},
		}}, nil
	}
	return nil, status.Error(codes.InvalidArgument, "message of an unknown kind")
}

// continueHeaders lets the headers pass with the changes in c; nil means none.
func continueHeaders(c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{
		RequestHeaders: &extprocv3.HeadersResponse{Response: c},
	}}
}

// continueBody lets the body pass with the changes in c; nil means none.
func continueBody(c *extprocv3.CommonResponse) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
		RequestBody: &extprocv3.BodyResponse{Response: c},
	}}
}

// askForBody lets Envoy hold the request until its whole body is there.
func askForBody() *extprocv3.ProcessingResponse {
	resp := continueHeaders(nil)
	resp.ModeOverride = mode(filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_SKIP)
	return resp
}

// streamBody has the body sent piece by piece while the headers still wait for
// their answer.
func streamBody() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{ModeOverride: mode(filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, filterv3.ProcessingMode_SEND)}
}

// mode is a processing mode of the request alone. All phases are named, because the
// zero value of a header mode means "send".
func mode(body filterv3.ProcessingMode_BodySendMode, trailers filterv3.ProcessingMode_HeaderSendMode) *filterv3.ProcessingMode {
	return &filterv3.ProcessingMode{
		RequestHeaderMode:   filterv3.ProcessingMode_SEND,
		RequestBodyMode:     body,
		RequestTrailerMode:  trailers,
		ResponseHeaderMode:  filterv3.ProcessingMode_SKIP,
		ResponseBodyMode:    filterv3.ProcessingMode_NONE,
		ResponseTrailerMode: filterv3.ProcessingMode_SKIP,
	}
}

// toCandidates names the workers of an unparsed request.
func toCandidates(list, pool string) *extprocv3.ProcessingResponse {
	resp := continueHeaders(&extprocv3.CommonResponse{
		HeaderMutation: &extprocv3.HeaderMutation{SetHeaders: []headerOption{header(names.Destination, list)}},
	})
	resp.DynamicMetadata = metadata(list, map[string]*structpb.Value{"pool": structpb.NewStringValue(pool)})
	return resp
}

// replaceBody needs a matching content-length in the same answer.
func replaceBody(body []byte) *extprocv3.BodyMutation {
	return &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}
}

// metadata holds the candidates for Envoy's load balancer, and mesh for its log.
func metadata(list string, mesh map[string]*structpb.Value) *structpb.Struct {
	lb := map[string]*structpb.Value{names.Destination: structpb.NewStringValue(list)}
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		names.MetadataLB:   structpb.NewStructValue(&structpb.Struct{Fields: lb}),
		names.MetadataMesh: structpb.NewStructValue(&structpb.Struct{Fields: mesh}),
	}}
}

// immediate answers the client with JSON. Details name the answer in Envoy's
// access log, and tell Envoy that the body has its final shape.
func immediate(code int, body []byte, details string, extra ...headerOption) *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extprocv3.ImmediateResponse{
			Status:  &typev3.HttpStatus{Code: typev3.StatusCode(code)},
			Headers: &extprocv3.HeaderMutation{SetHeaders: append(extra, header("content-type", "application/json"))},
			Body:    body,
			Details: details,
		},
	}}
}
