package redislink

import (
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
)

// sentinelScheme ends the schemes of URLs of Sentinels.
const sentinelScheme = "+sentinel://"

// sentinel reads the URL of Sentinels. The client asks them which server is the master,
// and again when they say that another one is.
func (c Config) sentinel() (*redis.FailoverOptions, error) {
	text, files, err := c.files()
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(text)
	if err != nil || (u.Scheme != "redis+sentinel" && u.Scheme != "rediss+sentinel") || u.Hostname() == "" {
		return nil, errURL
	}
	query := u.Query()
	master := strings.TrimPrefix(u.Path, "/")
	addrs := slices.Concat([]string{net.JoinHostPort(u.Hostname(), orPort(u.Port()))}, query["addr"])
	db, err := strconv.Atoi("0" + query.Get("db"))
	if master == "" || strings.Contains(master, "/") || err != nil {
		return nil, errURL
	}
	for _, addr := range query["addr"] {
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, errURL
		}
	}
	o := &redis.FailoverOptions{
		MasterName: master, SentinelAddrs: addrs, DB: db,
		SentinelUsername: query.Get("sentinel_user"), SentinelPassword: query.Get("sentinel_password"),
	}
	for _, known := range []string{"addr", "db", "sentinel_user", "sentinel_password"} {
		query.Del(known)
	}
	// The rest is as for one server.
	u.Scheme, u.Path, u.RawQuery = strings.TrimSuffix(u.Scheme, "+sentinel"), "", query.Encode()
	one := c
	one.URL, one.TrustedCA = u.String(), files.ca
	if files.cert != "" || files.key != "" {
		query.Set("cert", files.cert)
		query.Set("key", files.key)
		u.RawQuery = query.Encode()
		one.URL = u.String()
	}
	opts, err := one.options()
	if err != nil {
		return nil, err
	}
	o.Username, o.Password, o.TLSConfig = opts.Username, opts.Password, opts.TLSConfig
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = opts.DialTimeout, opts.ReadTimeout, opts.WriteTimeout, opts.PoolTimeout
	o.MaxRetries, o.DialerRetries, o.PoolSize = opts.MaxRetries, opts.DialerRetries, opts.PoolSize
	o.ContextTimeoutEnabled, o.DisableIdentity = true, true
	return o, nil
}

// orPort is a Sentinel's port where none is said.
func orPort(port string) string {
	if port == "" {
		return "26379"
	}
	return port
}
