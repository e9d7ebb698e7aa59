package envoy

import (
	mutationrulesv3 "github.com/envoyproxy/go-control-plane/envoy/config/common/mutation_rules/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	transformv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/transform/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/kvmesh/kvmesh/internal/names"
)

// filterModel reads the model's name out of a request, on the routes that say so.
const filterModel = "envoy.filters.http.transform"

// modelFilter stands in the filter chain after ext_proc and does nothing by itself.
func modelFilter() *hcmv3.HttpFilter { return httpFilter(filterModel, &transformv3.TransformConfig{}) }

// byModel makes a route that takes the generation requests of one path while no
// gateway answers: Envoy itself reads the model's name out of the JSON body, and
// looks for the route of that name. A name without one goes on here.
func byModel(r *routev3.Route, path string) *routev3.Route {
	r.Match = &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Path{Path: path}}
	if r.TypedPerFilterConfig == nil {
		r.TypedPerFilterConfig = map[string]*anypb.Any{}
	}
	r.TypedPerFilterConfig[filterModel] = packed(&transformv3.TransformConfig{
		RequestTransformation: &transformv3.Transformation{
			HeadersMutations: []*mutationrulesv3.HeaderMutation{{
				Action: &mutationrulesv3.HeaderMutation_Append{Append: header(names.Model, "%REQUEST_BODY(model)%")},
			}},
		},
		ClearRouteCache: true,
	})
	return r
}
