// Package istio will hold the custom resources and the generator for Istio. It
// holds nothing yet; policies are YAML files (internal/policy).
package istio
