//go:build unix

package kvrpc

import (
	"bufio"
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
)

// Identity is a KV node's certificate, its key, and the authority of all KV nodes, as PEM
// files. The certificate is for both sides of TLS (serverAuth and clientAuth). Certificate
// and key are read again for each connection, so that they can be renewed; the authority is
// read once.
type Identity struct {
	CertFile, KeyFile, CAFile string
	// ServerName is the name in the certificates of peers; default: their address.
	ServerName string
}

// Client returns the side that connects.
func (i Identity) Client() (*tls.Config, error) {
	pool, err := i.load()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool, ServerName: i.ServerName,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return i.certificate() },
	}, nil
}

// Server returns the side that listens.
func (i Identity) Server() (*tls.Config, error) {
	pool, err := i.load()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return i.certificate() },
	}, nil
}

// load reads everything once, so that what is wrong is known at the start.
func (i Identity) load() (*x509.CertPool, error) {
	if i.CertFile == "" || i.KeyFile == "" || i.CAFile == "" {
		return nil, errors.New("kvrpc: certificate, key and authority belong together")
	}
	if _, err := i.certificate(); err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(i.CAFile)
	if err != nil {
		return nil, fmt.Errorf("read the authority of the KV nodes: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("read the authority of the KV nodes: no certificate in %s", i.CAFile)
	}
	return pool, nil
}

// certificate reads certificate and key.
func (i Identity) certificate() (*tls.Certificate, error) {
	c, err := tls.LoadX509KeyPair(i.CertFile, i.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of the KV node: %w", err)
	}
	return &c, nil
}

// The protocols that are agreed on in the handshake.
const (
	protoControl = "h2"
	protoData    = "kvmesh-kv"
)

// withProtos returns a side that agrees on protocols, for a host where no name is set.
func withProtos(c *tls.Config, host string, protos ...string) *tls.Config {
	c = c.Clone()
	c.NextProtos = protos
	c.ServerName = cmp.Or(c.ServerName, host)
	// Records begin at their full length: small ones are for pages of the web.
	c.DynamicRecordSizingDisabled = true
	return c
}

// wide is a connection below TLS, which would otherwise ask the kernel twice for each
// record of 16 KiB, and give it each one alone.
type wide struct {
	net.Conn
	r *bufio.Reader
	w *bufio.Writer
	// held says that what is written waits for flush: several records go at once.
	held bool
}

// wideBuffer is how much goes to and from the kernel at once.
const wideBuffer = 128 << 10

func newWide(c net.Conn) *wide {
	return &wide{Conn: c, r: bufio.NewReaderSize(c, wideBuffer), w: bufio.NewWriterSize(c, wideBuffer)}
}

// Read implements net.Conn.
func (w *wide) Read(b []byte) (int, error) { return w.r.Read(b) }

// Write implements net.Conn.
func (w *wide) Write(b []byte) (int, error) {
	if w.held {
		return w.w.Write(b)
	}
	return w.Conn.Write(b)
}

// flush sends what was written since it was held.
func (w *wide) flush() error {
	w.held = false
	return w.w.Flush()
}
