package envoy

import (
	_ "embed"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	luav3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/lua/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/anypb"
)

// filterShape gives foreign servers' errors OpenAI's shape, on the routes that say so.
const filterShape = "envoy.filters.http.lua"

// shapeScript is the filter's program.
//
//go:embed shape.lua
var shapeScript string

// shapeFilter stands in the filter chain and does nothing by itself.
func shapeFilter() *hcmv3.HttpFilter {
	return httpFilter(filterShape, &luav3.Lua{SourceCodes: map[string]*corev3.DataSource{shapeErrors: inline(shapeScript)}})
}

// shapeErrors is the program's name.
const shapeErrors = "errors"

// shaped are the settings of a route to servers that are not ours, whose errors may
// look like anything.
func shaped() map[string]*anypb.Any {
	return map[string]*anypb.Any{filterShape: packed(&luav3.LuaPerRoute{Override: &luav3.LuaPerRoute_Name{Name: shapeErrors}})}
}
