//go:build unix

package kvrpc

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
	"path/filepath"
	"testing"
	"time"
)

// authority is one that makes certificates for a test.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newAuthority makes one, with its file ca.pem in dir.
func newAuthority(dir string) (*authority, error) {
	a := &authority{dir: dir}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, err
	}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "KV nodes of a test"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, a.key.Public(), a.key)
	if err != nil {
		return nil, err
	}
	return a, writePEM(filepath.Join(dir, "ca.pem"), "CERTIFICATE", der)
}

// issue makes a certificate for loopback, with some uses, and returns it as an identity.
func (a *authority) issue(name string, uses ...x509.ExtKeyUsage) (Identity, error) {
	id := Identity{
		CertFile: filepath.Join(a.dir, name+".pem"), KeyFile: filepath.Join(a.dir, name+".key"), CAFile: filepath.Join(a.dir, "ca.pem"),
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return id, err
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, ExtKeyUsage: uses,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	if err != nil {
		return id, err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return id, err
	}
	if err := writePEM(id.KeyFile, "EC PRIVATE KEY", private); err != nil {
		return id, err
	}
	return id, writePEM(id.CertFile, "CERTIFICATE", der)
}

// node makes a certificate for both sides.
func (a *authority) node(name string) (Identity, error) {
	return a.issue(name, x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth)
}

func writePEM(name, kind string, der []byte) error {
	return os.WriteFile(name, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// testIdentity makes an authority and a node's identity in a folder of the test's.
func testIdentity(t testing.TB) (*authority, Identity) {
	t.Helper()
	a, err := newAuthority(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	id, err := a.node("node")
	if err != nil {
		t.Fatal(err)
	}
	return a, id
}
