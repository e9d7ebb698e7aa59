package main

import (
	"context"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/dirstore"
	"github.com/kvmesh/kvmesh/kvcache/kvnode"
)

// tenantEraser erases a tenant, and tells now and then how many blocks were looked at.
type tenantEraser interface {
	eraseTenant(ctx context.Context, tenant string, looked func(int)) (blocks int, err error)
}

// eraseTenant has the node erase a tenant in its memory and all tiers. The node goes on when
// this command is stopped, and who runs it again meanwhile is told how far it is.
func (n nodeSurvey) eraseTenant(ctx context.Context, tenant string, looked func(int)) (int, error) {
	e, err := n.EraseTenant(ctx, tenant, func(e kvnode.Erased) { looked(e.Looked) })
	return e.Blocks, err
}

// dirSurvey is a directory as the commands see stores.
type dirSurvey struct{ *dirstore.Store }

// eraseTenant erases a tenant in a directory.
func (d dirSurvey) eraseTenant(ctx context.Context, tenant string, looked func(int)) (int, error) {
	n := 0
	return d.EraseTenant(ctx, kvcache.ErasureOf(tenant, func(more int) { n += more; looked(n) }))
}

// kvErased is the result of `kvmesh kv invalidate --tenant`.
type kvErased struct {
	Dir    string `json:"dir"`
	Tenant string `json:"tenant"`
	Blocks int    `json:"blocks"`
	Looked int    `json:"looked"`
	Used   int64  `json:"used_bytes"`
	// Left is what is not erased yet, and why; "" = nothing.
	Left string `json:"left,omitempty"`
}

// eraseTenantKV erases what a store has of a tenant. It neither lists what will go nor asks
// first, because the tenant's name was given in full, and the KV can be computed again; what
// counts is that the answer says whether all of it is gone.
func eraseTenantKV(ctx context.Context, o *kvStore, tenant string) error {
	s, js, err := o.openAny()
	if err != nil {
		return err
	}
	defer s.Close()
	p := progress{e: o.e, what: "looked at"}
	r := kvErased{Dir: o.dir, Tenant: tenant}
	r.Blocks, err = s.eraseTenant(ctx, tenant, func(n int) {
		r.Looked = n
		p.at(n, time.Now())
	})
	if err != nil {
		r.Left = err.Error()
	}
	r.Used = s.Stats().Used
	var werr error
	if js {
		werr = writeJSON(o.e.stdout, r)
	} else {
		_, werr = fmt.Fprintf(o.e.stdout, "erased %d blocks and the tails of tenant %q; looked at %d\n", r.Blocks, tenant, r.Looked)
	}
	if err != nil {
		return withHint(err, "a KV peer that is named erases it when it is back, as long as this node runs or its --dir lasts; for another tier, run it again when that is back")
	}
	return werr
}
