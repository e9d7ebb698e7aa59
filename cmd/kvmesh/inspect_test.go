package main

import "testing"

// Of a worker that takes no requests anyway, Envoy's own opinion is no difference.
func TestDifference(t *testing.T) {
	for _, tt := range []struct {
		name string
		d    endpointDiff
		want string
	}{
		{"the same", endpointDiff{Want: seen{"HEALTHY", 5}, Envoy: seen{"HEALTHY", 5}}, ""},
		{"draining", endpointDiff{Want: seen{"DRAINING", 5}, Envoy: seen{"UNHEALTHY", 5}}, ""},
		{"sick for both", endpointDiff{Want: seen{"UNHEALTHY", 5}, Envoy: seen{"UNHEALTHY", 5}, Ejected: true, FailedCheck: true}, ""},
		{"ejected", endpointDiff{Want: seen{"HEALTHY", 5}, Envoy: seen{"HEALTHY", 5}, Ejected: true}, "ejected by envoy"},
		{"fails the check", endpointDiff{Want: seen{"HEALTHY", 5}, Envoy: seen{"HEALTHY", 5}, FailedCheck: true}, "fails envoy's health check"},
		{"sick, not heard", endpointDiff{Want: seen{"UNHEALTHY", 5}, Envoy: seen{"HEALTHY", 5}, FailedCheck: true}, "status"},
		{"weight", endpointDiff{Want: seen{"HEALTHY", 5}, Envoy: seen{"HEALTHY", 6}}, "weight"},
		{"missing", endpointDiff{Want: seen{"HEALTHY", 5}}, "not in envoy"},
		{"left over", endpointDiff{Envoy: seen{"HEALTHY", 5}}, "not wanted"},
	} {
		if got := difference(tt.d); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
}
