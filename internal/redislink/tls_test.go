package redislink_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"os/exec"
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

// rediss:// speaks TLS to a server of the given authority, and to no other.
func TestTLS(t *testing.T) {
	cert, key := certificate(t)
	if path, err := exec.LookPath("redis-server"); err == nil {
		// A build without TLS does not know the option at all.
		out, _ := exec.Command(path, "--port", "0", "--tls-port", "1", "--tls-cert-file", filepath.Join(t.TempDir(), "none")).CombinedOutput()
		if strings.Contains(string(out), "Bad directive") {
			t.Skip("this redis-server has no TLS")
		}
	}
	s := redistest.Start(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range [][2]string{
		{"tls-cert-file", cert}, {"tls-key-file", key}, {"tls-ca-cert-file", cert}, {"tls-auth-clients", "no"}, {"tls-port", port},
	} {
		if err := s.Client.ConfigSet(t.Context(), set[0], set[1]).Err(); err != nil {
			t.Fatalf("%v: %v", set, err)
		}
	}
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
