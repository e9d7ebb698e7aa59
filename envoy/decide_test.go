package envoy_test

import (
	"strconv"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// proceed lets the headers pass as they are.
func proceed() *extprocv3.ProcessingResponse {
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestHeaders{
		RequestHeaders: &extprocv3.HeadersResponse{},
	}}
}

// withHeaders sets headers in the answer to the headers message.
func withHeaders(kv ...string) *extprocv3.ProcessingResponse {
	r := proceed()
	r.GetRequestHeaders().Response = common(kv...)
	return r
}

func common(kv ...string) *extprocv3.CommonResponse {
	m := &extprocv3.HeaderMutation{}
	for i := 0; i < len(kv); i += 2 {
		m.SetHeaders = append(m.SetHeaders, &corev3.HeaderValueOption{
			Header:       &corev3.HeaderValue{Key: kv[i], RawValue: []byte(kv[i+1])},
			AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		})
	}
	return &extprocv3.CommonResponse{HeaderMutation: m}
}

// askBody turns buffering of the body on, as the gateway does on the paths it
// parses, and receives the body.
func askBody(s stream) ([]byte, error) {
	if _, err := s.Recv(); err != nil {
		return nil, err
	}
	return switchToBody(s)
}

// buffered lets a request pass whose headers were received, after its body was.
func buffered(s stream) error {
	if _, err := switchToBody(s); err != nil {
		return err
	}
	return s.Send(bodyAnswer(nil))
}

func switchToBody(s stream) ([]byte, error) {
	r := proceed()
	r.ModeOverride = &filterv3.ProcessingMode{
		RequestBodyMode:    filterv3.ProcessingMode_BUFFERED,
		ResponseHeaderMode: filterv3.ProcessingMode_SKIP,
	}
	if err := s.Send(r); err != nil {
		return nil, err
	}
	m, err := s.Recv()
	return m.GetRequestBody().GetBody(), err
}

// bodyAnswer answers the body message: headers, and a new body unless nil.
func bodyAnswer(body []byte, kv ...string) *extprocv3.ProcessingResponse {
	c := common(kv...)
	if body != nil {
		c.BodyMutation = &extprocv3.BodyMutation{Mutation: &extprocv3.BodyMutation_Body{Body: body}}
	}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_RequestBody{
		RequestBody: &extprocv3.BodyResponse{Response: c},
	}}
}

// refuse is an immediate answer of the gateway.
func refuse(status typev3.StatusCode, body, details string) *extprocv3.ProcessingResponse {
	h := &extprocv3.HeaderMutation{SetHeaders: []*corev3.HeaderValueOption{{
		Header: &corev3.HeaderValue{Key: "content-type", RawValue: []byte("application/json")},
	}}}
	return &extprocv3.ProcessingResponse{Response: &extprocv3.ProcessingResponse_ImmediateResponse{
		ImmediateResponse: &extprocv3.ImmediateResponse{
			Status: &typev3.HttpStatus{Code: status}, Body: []byte(body), Headers: h, Details: details,
		},
	}}
}

// destination names endpoints in order, in the metadata of the endpoint-picker
// protocol.
func destination(r *extprocv3.ProcessingResponse, namespace, key, value string) *extprocv3.ProcessingResponse {
	r.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		namespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			key: structpb.NewStringValue(value),
		}}),
	}}
	return r
}

// path returns the :path of a headers message.
func path(r *extprocv3.ProcessingRequest) string {
	for _, h := range r.GetRequestHeaders().GetHeaders().GetHeaders() {
		if h.GetKey() == ":path" {
			return string(h.GetRawValue())
		}
	}
	return ""
}

func itoa(n int) string { return strconv.Itoa(n) }
