package envoy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// JSON writes a message in the form Envoy reads with --config-path, indented and
// with the fields' proto names. The text of equal messages is equal.
func JSON(m proto.Message) ([]byte, error) {
	raw, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write %s as JSON: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	// protojson varies its white space on purpose; a second pass fixes it.
	var v any
	if err := json.Unmarshal(raw, &v); err != nil {
		return nil, fmt.Errorf("read back JSON: %w", err)
	}
	return json.MarshalIndent(v, "", "  ")
}

// packed wraps an extension's configuration. The only way to fail is a string
// that is no UTF-8, and all strings come from YAML or from constants.
func packed(m proto.Message) *anypb.Any {
	out := &anypb.Any{}
	if err := anypb.MarshalFrom(out, m, proto.MarshalOptions{Deterministic: true}); err != nil {
		panic(fmt.Sprintf("envoy: pack %s: %v", m.ProtoReflect().Descriptor().FullName(), err))
	}
	return out
}

// extension names a typed extension.
func extension(name string, m proto.Message) *corev3.TypedExtensionConfig {
	return &corev3.TypedExtensionConfig{Name: name, TypedConfig: packed(m)}
}

// seconds writes a duration; 0 is a value of its own and means "off" where Envoy
// has time-outs.
func seconds(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// u32 is a number that is given, as opposed to left to Envoy's default.
func u32(v uint32) *wrapperspb.UInt32Value { return wrapperspb.UInt32(v) }

// address makes an Envoy address of an ip:port or of a Unix socket's path.
func address(s string) *corev3.Address {
	if strings.HasPrefix(s, "/") {
		return &corev3.Address{Address: &corev3.Address_Pipe{Pipe: &corev3.Pipe{Path: s}}}
	}
	ap, err := netip.ParseAddrPort(s)
	if err != nil { // Envoy refuses an empty address, so the mistake cannot go unseen
		return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{}}}
	}
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       ap.Addr().String(),
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(ap.Port())},
	}}}
}

// exact matches one string.
func exact(s string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: s}}
}

// prefix matches strings that begin with s.
func prefix(s string) *matcherv3.StringMatcher {
	return &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Prefix{Prefix: s}}
}
