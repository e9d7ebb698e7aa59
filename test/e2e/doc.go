// Package e2e runs txtar scripts against whole meshes with a real Envoy. The
// commands beyond testscript's own:
//
//	mesh ARGS…              start `kvmesh up ARGS…`, wait until it is ready
//	http [-X M] [-H K:V]… [-d DATA | -f FILE | -zero N] [-noretry] PATH
//	                        send a request to Envoy; stdout gets status line, headers, body
//	signal SIG PART…        KILL, STOP, CONT or TERM to up, envoy, gateway, controlplane or a worker's id
//	status ID STATUS        wait until the control plane and Envoy see a worker so
//	gone                    the mesh's processes and sockets are no more
//
// $KVMESH is the binary, for what runs in the background; $EXAMPLES holds the examples.
package e2e
