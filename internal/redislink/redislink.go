// Package redislink connects to a Redis or Valkey server the way the mesh wants it:
// nothing waits for it longer than a second, nothing is repeated behind the caller's
// back, and no error or log line ever holds the password of its URL.
package redislink

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

func init() {
	// The library prints every failed connection to stderr. Callers get the error and
	// say it once.
	redis.SetLogger(silent{})
}

// silent is the library's logger.
type silent struct{}

// Printf implements the library's interface.
func (silent) Printf(context.Context, string, ...any) {}

// timeout bounds connecting, and each read and write, unless Config says otherwise.
const timeout = time.Second

// errURL says what a URL must look like. Errors of parsers repeat their input, which
// may hold a password, so they are not passed on.
var errURL = errors.New("want redis://HOST:PORT, rediss://HOST:PORT for TLS or unix:///PATH, with USER:PASSWORD@ before the host where the server asks for one and /N after it for a database")

// Config says how to connect.
type Config struct {
	// URL is redis://, rediss:// or unix://, with user and password where needed.
	URL string
	// TrustedCA is a PEM file of authorities for rediss://, "" for the system's.
	TrustedCA string
	// Timeout bounds connecting, and each read and write; 0 is a second.
	Timeout time.Duration
	// Connections is the most to one server; 0 is 4.
	Connections int
}

// Validate reports a URL that cannot be connected to.
func (c Config) Validate() error {
	_, err := c.options()
	return err
}

// Shown is the URL as logs may have it.
func (c Config) Shown() string {
	u, err := url.Parse(c.URL)
	if err != nil {
		return "redis"
	}
	// Options in the query may be secrets one day; none of them helps a reader.
	u.User, u.RawQuery = nil, ""
	return u.String()
}

// Open makes a client. It does not connect: that happens with the first command, and
// again with each one while there is no connection. The caller closes it.
func Open(c Config) (*redis.Client, error) {
	opts, err := c.options()
	if err != nil {
		return nil, err
	}
	return redis.NewClient(opts), nil
}

// named reports whether a URL says where the server is. The library takes this host for
// one that does not, which hides a variable that was empty.
func named(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (u.Scheme == "unix" || u.Hostname() != "")
}

// options checks the URL and adds the mesh's own settings.
func (c Config) options() (*redis.Options, error) {
	opts, err := redis.ParseURL(c.URL)
	if err != nil || !named(c.URL) {
		return nil, errURL
	}
	limit := cmp.Or(c.Timeout, timeout)
	opts.DialTimeout, opts.ReadTimeout, opts.WriteTimeout, opts.PoolTimeout = limit, limit, limit, limit
	opts.MaxRetries, opts.DialerRetries = -1, 1
	opts.PoolSize, opts.ContextTimeoutEnabled = cmp.Or(c.Connections, 4), true
	// Old servers and proxies answer these extras with errors.
	opts.DisableIdentity = true
	opts.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	if opts.TLSConfig != nil && c.TrustedCA != "" {
		pem, err := os.ReadFile(c.TrustedCA)
		if err != nil {
			return nil, fmt.Errorf("authorities of Redis: %w", err)
		}
		opts.TLSConfig.RootCAs = x509.NewCertPool()
		if !opts.TLSConfig.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("authorities of Redis: %s holds no certificate", c.TrustedCA)
		}
		opts.TLSConfig.MinVersion = tls.VersionTLS12
	}
	return opts, nil
}
