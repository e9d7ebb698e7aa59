// Package s3link connects to a server of objects that speaks S3, the way the mesh wants
// it: nothing is repeated behind the caller's back.
package s3link

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Config says where the server is and who asks.
type Config struct {
	// Endpoint is the URL of the server, empty for Amazon's.
	Endpoint string
	// Region is the server's, where it has one.
	Region string
	// AccessKey, SecretKey and SessionToken say who asks. Without keys, Amazon's
	// endpoint is asked with what the machine has: the shared credentials file or its
	// role. Another endpoint is asked anonymously.
	AccessKey, SecretKey, SessionToken string
}

// Validate reports an endpoint that is no URL of a server.
func (c Config) Validate() error {
	_, _, err := c.host()
	return err
}

// host is the server's address, and whether it is asked with TLS.
func (c Config) host() (host string, secure bool, err error) {
	if c.Endpoint == "" {
		return "s3.amazonaws.com", true, nil
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") || strings.Trim(u.Path, "/") != "" {
		// The parser's error repeats its input, which may hold a password.
		return "", false, errors.New("endpoint of S3: want http(s)://HOST:PORT")
	}
	return u.Host, u.Scheme == "https", nil
}

// Open makes a client. It does not connect.
func Open(c Config) (*minio.Core, error) {
	host, secure, err := c.host()
	if err != nil {
		return nil, err
	}
	opts := &minio.Options{Secure: secure, Region: c.Region, MaxRetries: 1}
	switch {
	case c.AccessKey != "":
		opts.Creds = credentials.NewStaticV4(c.AccessKey, c.SecretKey, c.SessionToken)
	case c.Endpoint == "":
		opts.Creds = credentials.NewChainCredentials([]credentials.Provider{
			&credentials.FileAWSCredentials{}, &credentials.IAM{},
		})
	}
	core, err := minio.NewCore(host, opts)
	if err != nil {
		return nil, fmt.Errorf("S3: %w", err)
	}
	return core, nil
}
