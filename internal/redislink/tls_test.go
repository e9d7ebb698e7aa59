package redislink_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/internal/redislink"
	"github.com/kvmesh/kvmesh/internal/redislink/redistest"
)

// certificate makes one for 127.0.0.1, signed by itself.
func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "redis"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: pkcs8}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// unwrap listens with TLS and passes what is in it on to a server. Not every build of
// a server speaks TLS itself.
func unwrap(t *testing.T, to, cert, key string) (addr string) {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	lis, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{pair}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lis.Close() })
	go func() {
		for {
			c, err := lis.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				up, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer up.Close()
				go func() { _, _ = io.Copy(c, up) }() // ends with the connection
				_, _ = io.Copy(up, c)
			}()
		}
	}()
	return lis.Addr().String()
}

// rediss:// speaks TLS to a server of the given authority, and to no other.
func TestTLS(t *testing.T) {
	cert, key := certificate(t)
	addr := unwrap(t, redistest.Start(t).Addr, cert, key)
	ping := func(c redislink.Config) error {
		client, err := redislink.Open(c)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		return client.Ping(t.Context()).Err()
	}
	if err := ping(redislink.Config{URL: "rediss://" + addr, TrustedCA: cert}); err != nil {
		t.Error(err)
	}
	if err := ping(redislink.Config{URL: "rediss://" + addr}); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown authority: %v", err)
	}
	if err := ping(redislink.Config{URL: "redis://" + addr}); err == nil {
		t.Error("spoke plain text to a TLS port")
	}
}
