// Package redislink connects to a Redis or Valkey server the way the mesh wants it:
// nothing waits for it longer than a second, nothing is repeated behind the caller's
// back, and no error or log line ever holds the password of its URL.
//
// # URLs
//
// What a URL says beside user, host and database stands in its query; in all of them
//
//	ca=FILE             authorities of rediss://, PEM, in place of the system's
//	cert=FILE key=FILE  this client's certificate, PEM
//
// and where it is not one server:
//
//	redis://H1:P1?addr=H2:P2&addr=…                a node of a cluster, and others
//	redis+sentinel://H1:P1/MASTER?addr=H2:P2&…     Sentinels, and the name of what they watch
//	         …&db=N                                its database
//	         …&sentinel_user=U&sentinel_password=P at the Sentinels; those before the host
//	                                               are the server's
//
// each with rediss in place of redis for TLS, to servers and Sentinels.
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
	"strings"
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
var errURL = errors.New("want redis://HOST:PORT, rediss://HOST:PORT for TLS, redis+sentinel://HOST:PORT/MASTER or unix:///PATH, with USER:PASSWORD@ before the host where the server asks for one and /N after it for a database")

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
	client, err := Open(c)
	if err == nil {
		err = client.Close() // it has not connected
	}
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
	if strings.Contains(c.URL, sentinelScheme) {
		opts, err := c.sentinel()
		if err != nil {
			return nil, err
		}
		return redis.NewFailoverClient(opts), nil
	}
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
	text, files, err := c.files()
	if err != nil {
		return nil, err
	}
	opts, err := redis.ParseURL(text)
	if err != nil || !named(text) {
		return nil, errURL
	}
	limit := cmp.Or(c.Timeout, timeout)
	opts.DialTimeout, opts.ReadTimeout, opts.WriteTimeout, opts.PoolTimeout = limit, limit, limit, limit
	opts.MaxRetries, opts.DialerRetries = -1, 1
	opts.PoolSize, opts.ContextTimeoutEnabled = cmp.Or(c.Connections, 4), true
	// Old servers and proxies answer these extras with errors.
	opts.DisableIdentity = true
	opts.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	if opts.TLSConfig != nil {
		err = files.use(opts.TLSConfig)
	} else if files.cert != "" || files.key != "" {
		err = errors.New("a client certificate for Redis needs rediss://")
	}
	return opts, err
}

// tlsFiles are the files of a TLS connection.
type tlsFiles struct{ ca, cert, key string }

// files takes the names of files out of the URL.
func (c Config) files() (rest string, f tlsFiles, err error) {
	u, err := url.Parse(c.URL)
	if err != nil {
		return "", f, errURL
	}
	query := u.Query()
	f = tlsFiles{ca: cmp.Or(query.Get("ca"), c.TrustedCA), cert: query.Get("cert"), key: query.Get("key")}
	for _, name := range []string{"ca", "cert", "key"} {
		query.Del(name)
	}
	u.RawQuery = query.Encode()
	return u.String(), f, nil
}

// use reads the files.
func (f tlsFiles) use(to *tls.Config) error {
	to.MinVersion = tls.VersionTLS12
	if f.ca != "" {
		pem, err := os.ReadFile(f.ca)
		if err != nil {
			return fmt.Errorf("authorities of Redis: %w", err)
		}
		to.RootCAs = x509.NewCertPool()
		if !to.RootCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("authorities of Redis: %s holds no certificate", f.ca)
		}
	}
	if f.cert == "" && f.key == "" {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("certificate for Redis, of cert=%s and key=%s: %w", f.cert, f.key, err)
	}
	to.Certificates = []tls.Certificate{pair}
	return nil
}
