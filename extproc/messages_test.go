package extproc

import (
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/reflect/protoreflect"
)

func protoName(s string) protoreflect.Name { return protoreflect.Name(s) }

// anyMessage makes one of the kinds of messages Envoy could send, and some it
// could not.
func anyMessage(kind byte, path, body, junk string) *extprocv3.ProcessingRequest {
	headers := &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: junk, RawValue: []byte(junk)}}}}
	switch kind % 8 {
	case 0:
		return headersMsg(kind&8 != 0, "POST", path, "content-length", junk, "x-session-id", junk)
	case 1:
		return bodyMsg(body)
	case 2:
		return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestTrailers{RequestTrailers: &extprocv3.HttpTrailers{}}}
	case 3:
		return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers}}
	case 4:
		return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseBody{ResponseBody: &extprocv3.HttpBody{Body: []byte(body)}}}
	case 5:
		return &extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_ResponseTrailers{}}
	case 6:
		return headersMsg(true, junk, path)
	}
	return &extprocv3.ProcessingRequest{}
}
