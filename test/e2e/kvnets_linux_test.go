package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/test/testmesh"
)

// TestTwoHosts: TestHostDies and TestPeerTroubles once more on two hosts that are network
// namespaces, with TLS between their KV nodes. All that runs on the first one is killed and
// its line is down; the wire between them is cut, or each frame takes 100 ms and one of a
// hundred is lost, so that TCP has to send it again.
func TestTwoHosts(t *testing.T) {
	t.Run("dies", func(t *testing.T) { hostDies(t, simProcess, namespaces) })
	t.Run("troubles", func(t *testing.T) { peerTroubles(t, namespaces(t)) })
}

// namespaces starts the nodes of two hosts, each in a namespace of its own. Where this
// machine has none the test is skipped.
func namespaces(t testing.TB) *hosts {
	t.Helper()
	var on [2]*testmesh.Host
	for i := range on {
		h, err := testmesh.NewHost(t, i)
		if errors.Is(err, testmesh.ErrNoHosts) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		on[i] = h
	}
	wire, err := testmesh.NewWire(t, on[0], on[1])
	if errors.Is(err, testmesh.ErrNoHosts) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	ca := newKVAuthority(t)
	at := [2]string{wire.Addrs[0] + ":9096", wire.Addrs[1] + ":9096"}
	node := func(i int, id string) *kvNode {
		cert, key := ca.issue(id, wire.Addrs[i])
		return startNodeOn(t, on[i], kvDir(t), "--peer-listen", at[i], "--id", id, "--peers", "a=east@"+at[0]+",b=west@"+at[1],
			"--peer-tls-cert", cert, "--peer-tls-key", key, "--peer-tls-ca", ca.file)
	}
	h := &hosts{a: node(0, "a"), b: node(1, "b")}
	sim := func(i int) starter {
		return func(t testing.TB, id string, args ...string) *process {
			return launchOn(t, on[i], id, append(simArgs(), args...)...)
		}
	}
	h.near, h.far = sim(0), sim(1)
	h.up = wire.Up
	h.slow = func(slow bool) {
		if !slow {
			wire.Slow(0, 0)
			f := wire.Frames()
			t.Logf("the wire: %+v", f)
			if f.Lost == 0 {
				t.Error("the wire was slow and lost nothing")
			}
			return
		}
		wire.Slow(100*time.Millisecond, 100)
	}
	h.die = func() {
		wire.Up(false)
		if err := on[0].Die(); err != nil {
			t.Fatal(err)
		}
		h.a.lose()
	}
	return h
}

// kvAuthority is one for the certificates of KV nodes.
type kvAuthority struct {
	testing.TB
	file string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newKVAuthority(t testing.TB) *kvAuthority {
	t.Helper()
	a := &kvAuthority{TB: t, file: filepath.Join(t.TempDir(), "ca.pem")}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "KV nodes of a test"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	a.key = a.newKey()
	a.write(a.file, "CERTIFICATE", a.sign(a.cert, a.key))
	return a
}

// issue makes the certificate of a node with an address, and names its files.
func (a *kvAuthority) issue(id, addr string) (certFile, keyFile string) {
	a.Helper()
	key := a.newKey()
	der := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: id}, IPAddresses: []net.IP{net.ParseIP(addr)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		NotBefore:   time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}, key)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.Fatal(err)
	}
	dir := filepath.Dir(a.file)
	certFile, keyFile = filepath.Join(dir, id+".pem"), filepath.Join(dir, id+".key")
	a.write(certFile, "CERTIFICATE", der)
	a.write(keyFile, "PRIVATE KEY", private)
	return certFile, keyFile
}

// sign makes a certificate for a key.
func (a *kvAuthority) sign(c *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	a.Helper()
	der, err := x509.CreateCertificate(rand.Reader, c, a.cert, key.Public(), a.key)
	if err != nil {
		a.Fatal(err)
	}
	return der
}

func (a *kvAuthority) newKey() *ecdsa.PrivateKey {
	a.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.Fatal(err)
	}
	return key
}

func (a *kvAuthority) write(file, kind string, der []byte) {
	a.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.Fatal(err)
	}
}
