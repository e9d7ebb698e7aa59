package envoy

import (
	"net/http"
	"strings"
	"time"

	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/config/accesslog/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filelogv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/file/v3"
	celv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// retryAfter is what clients are told when no worker can be reached.
const retryAfter = time.Second

// localReplies gives Envoy's own error answers OpenAI's shape. The gateway's
// immediate answers pass Envoy's local reply path too; they have that shape
// already and are told apart by their response code details, which the gateway
// leaves empty or begins with "kvmesh".
func localReplies() *hcmv3.LocalReplyConfig {
	out := &hcmv3.LocalReplyConfig{Mappers: []*hcmv3.ResponseMapper{crowded()}}
	for _, e := range []*openai.Error{
		openai.Errorf(http.StatusBadRequest, "The request is not valid HTTP."),
		openai.Errorf(http.StatusNotFound, "There is nothing at this address."),
		openai.Errorf(http.StatusRequestTimeout, "The request did not arrive in time."),
		openai.Errorf(http.StatusRequestEntityTooLarge, "The request body is larger than this server accepts."),
		openai.Errorf(http.StatusRequestHeaderFieldsTooLarge, "The request's headers are larger than this server accepts."),
		openai.Errorf(http.StatusInternalServerError, "The server failed to handle the request."),
		openai.Errorf(http.StatusBadGateway, "The answer of the worker could not be read."),
		openai.Unavailable(retryAfter, "No worker can be reached at the moment. Please try again."),
		openai.Errorf(http.StatusGatewayTimeout, "The worker did not answer in time."),
	} {
		out.Mappers = append(out.Mappers, mapper(e, accesslogv3.ComparisonFilter_EQ, uint32(e.Status)))
	}
	// Whatever else Envoy may think of, now or in a later version.
	rest := openai.Errorf(http.StatusBadRequest, "The request was refused.")
	out.Mappers = append(out.Mappers, mapper(rest, accesslogv3.ComparisonFilter_GE, http.StatusBadRequest))
	return out
}

// ownFaults marks the error answers that Envoy makes up for the relay, which else could not
// tell them from a server's: a 503 of the one says that nobody is there, of the other that
// it is busy.
func ownFaults() *hcmv3.LocalReplyConfig {
	return &hcmv3.LocalReplyConfig{Mappers: []*hcmv3.ResponseMapper{{
		Filter:       statusFilter(accesslogv3.ComparisonFilter_GE, http.StatusBadRequest),
		HeadersToAdd: []*corev3.HeaderValueOption{header(names.Fault, "%RESPONSE_FLAGS%")},
	}}}
}

// mapper answers one status, or all from it on, with a fixed error object. The
// message is fixed because Envoy's own text would need escaping inside JSON, and it
// tells clients nothing they can use.
func mapper(e *openai.Error, op accesslogv3.ComparisonFilter_Op, status uint32) *hcmv3.ResponseMapper {
	m := &hcmv3.ResponseMapper{
		Filter: and(statusFilter(op, status), ownReply()),
		BodyFormatOverride: &corev3.SubstitutionFormatString{
			Format: &corev3.SubstitutionFormatString_TextFormatSource{TextFormatSource: inline(
				strings.ReplaceAll(string(e.Body()), "%", "%%"), // % begins a command
			)},
			ContentType: "application/json",
		},
	}
	if s := e.RetryAfterSeconds(); s != "" {
		m.HeadersToAdd = []*corev3.HeaderValueOption{header("retry-after", s)}
	}
	return m
}

// crowded answers requests whose headers are within the limits, but not with those
// of the gateway beside them. Envoy calls that a fault of the gateway; it is the
// client's to send less.
func crowded() *hcmv3.ResponseMapper {
	e := openai.Errorf(http.StatusRequestHeaderFieldsTooLarge, "The request's headers are larger than this server accepts.")
	m := mapper(e, accesslogv3.ComparisonFilter_EQ, http.StatusInternalServerError)
	m.Filter = and(statusFilter(accesslogv3.ComparisonFilter_EQ, http.StatusInternalServerError),
		details(`response.code_details == "header_mutation_result_exceeds_limit"`))
	m.StatusCode = u32(http.StatusRequestHeaderFieldsTooLarge)
	return m
}

// ownReply matches the answers that Envoy itself makes up.
func ownReply() *accesslogv3.AccessLogFilter {
	return details(`response.code_details != "" && !response.code_details.startsWith("kvmesh")`)
}

// details matches by a CEL expression over what Envoy knows of its answer.
func details(expression string) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_ExtensionFilter{
		ExtensionFilter: &accesslogv3.ExtensionFilter{
			Name: "envoy.access_loggers.extension_filters.cel",
			ConfigType: &accesslogv3.ExtensionFilter_TypedConfig{TypedConfig: packed(&celv3.ExpressionFilter{
				Expression: expression,
			})},
		},
	}}
}

// and holds when all filters do.
func and(fs ...*accesslogv3.AccessLogFilter) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_AndFilter{
		AndFilter: &accesslogv3.AndFilter{Filters: fs},
	}}
}

// statusFilter compares the answer's status. Envoy wants a runtime key beside every
// such number; nobody sets this one.
func statusFilter(op accesslogv3.ComparisonFilter_Op, status uint32) *accesslogv3.AccessLogFilter {
	return &accesslogv3.AccessLogFilter{FilterSpecifier: &accesslogv3.AccessLogFilter_StatusCodeFilter{
		StatusCodeFilter: &accesslogv3.StatusCodeFilter{Comparison: &accesslogv3.ComparisonFilter{
			Op: op,
			Value: &corev3.RuntimeUInt32{
				DefaultValue: status,
				RuntimeKey:   "kvmesh.local_reply_status", // required, never set
			},
		}},
	}}
}

// inline is text that stands in the configuration itself.
func inline(s string) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_InlineString{InlineString: s}}
}

// header sets a response header, over whatever the worker sent.
func header(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{
		Header:       &corev3.HeaderValue{Key: name, Value: value},
		AppendAction: corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// accessLog writes one JSON object per request: no query, no bodies, no
// credentials.
func accessLog(path string) []*accesslogv3.AccessLog {
	if path == "" {
		return nil
	}
	fields := map[string]*structpb.Value{}
	for k, v := range map[string]string{
		"time":        "%START_TIME(%Y-%m-%dT%H:%M:%S.%3fZ)%",
		"request_id":  "%REQ(X-REQUEST-ID)%",
		"method":      "%REQ(:METHOD)%",
		"path":        "%PATH(NQ)%",
		"protocol":    "%PROTOCOL%",
		"code":        "%RESPONSE_CODE%",
		"flags":       "%RESPONSE_FLAGS%",
		"details":     "%RESPONSE_CODE_DETAILS%",
		"cluster":     "%UPSTREAM_CLUSTER%",
		"upstream":    "%UPSTREAM_HOST%",
		"attempts":    "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
		"worker":      "%RESP(X-KVMESH-WORKER)%",
		"model":       "%DYNAMIC_METADATA(kvmesh:model)%",
		"pool":        "%DYNAMIC_METADATA(kvmesh:pool)%",
		"ext_proc":    "%FILTER_STATE(envoy.filters.http.ext_proc:PLAIN)%",
		"duration_ms": "%DURATION%",
		"first_ms":    "%RESPONSE_DURATION%",
		"bytes_in":    "%BYTES_RECEIVED%",
		"bytes_out":   "%BYTES_SENT%",
		"client":      "%DOWNSTREAM_REMOTE_ADDRESS%",
	} {
		fields[k] = structpb.NewStringValue(v)
	}
	return []*accesslogv3.AccessLog{{
		Name: "envoy.access_loggers.file",
		ConfigType: &accesslogv3.AccessLog_TypedConfig{TypedConfig: packed(&filelogv3.FileAccessLog{
			Path: path,
			AccessLogFormat: &filelogv3.FileAccessLog_LogFormat{LogFormat: &corev3.SubstitutionFormatString{
				Format: &corev3.SubstitutionFormatString_JsonFormat{JsonFormat: &structpb.Struct{Fields: fields}},
			}},
		})},
	}}
}

// httpFilter names an HTTP filter with its configuration.
func httpFilter(name string, m proto.Message) *hcmv3.HttpFilter {
	return &hcmv3.HttpFilter{Name: name, ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: packed(m)}}
}
