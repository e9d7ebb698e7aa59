package redislink

import (
	"net"
	"net/url"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
)

// reload is how old a client's idea of a cluster may be. After a failover the dead
// node is asked until then.
const reload = time.Second

// OpenCluster makes a client of a Redis or Valkey Cluster. The URL names one of its
// nodes; others, which are asked where the first does not answer, follow as
// addr=HOST:PORT in its query, once for each. It does not connect. The caller closes it.
func OpenCluster(c Config) (*redis.ClusterClient, error) {
	u, err := url.Parse(c.URL)
	if err != nil {
		return nil, errURL
	}
	query := u.Query()
	more := query["addr"]
	query.Del("addr")
	u.RawQuery = query.Encode()
	one := c
	one.URL = u.String()
	opts, err := one.options()
	if err != nil {
		return nil, err
	}
	for _, addr := range more {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, errURL
		}
	}
	if opts.Network == "unix" || opts.DB != 0 {
		return nil, errURL // a cluster has neither
	}
	return redis.NewClusterClient(&redis.ClusterOptions{
		Addrs:    slices.Concat([]string{opts.Addr}, more),
		Username: opts.Username, Password: opts.Password, TLSConfig: opts.TLSConfig,
		DialTimeout: opts.DialTimeout, ReadTimeout: opts.ReadTimeout, WriteTimeout: opts.WriteTimeout, PoolTimeout: opts.PoolTimeout,
		// Redirections are answers of a healthy cluster, not repetitions.
		MaxRedirects: 3, MaxRetries: opts.MaxRetries, DialerRetries: opts.DialerRetries,
		PoolSize: opts.PoolSize, ContextTimeoutEnabled: true,
		DisableIdentity: true, DisableRoutingPolicies: true, MaintNotificationsConfig: opts.MaintNotificationsConfig,
		ClusterStateReloadInterval: reload,
	}), nil
}
