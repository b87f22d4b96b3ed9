// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// certificateLife is how long certificates are valid: as long as tokens.
const certificateLife = 24 * time.Hour

// authority is a certificate authority of the cluster. There are two: one for
// clients, one for the servers other than kube-apiserver (envtest makes its).
type authority struct {
	cert    *x509.Certificate
	key     *ecdsa.PrivateKey
	certPEM []byte
	keyPEM  []byte
}

func newAuthority(name string) (*authority, error) {
	template := certificateTemplate(pkix.Name{CommonName: name})
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	a := &authority{}
	certPEM, keyPEM, err := a.sign(template)
	if err != nil {
		return nil, fmt.Errorf("making certificate authority %s: %w", name, err)
	}
	a.certPEM, a.keyPEM = certPEM, keyPEM
	return a, nil
}

// clientCertificate certifies a user with its groups.
func (a *authority) clientCertificate(user string, groups []string) (certPEM, keyPEM []byte, err error) {
	template := certificateTemplate(pkix.Name{CommonName: user, Organization: groups})
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	certPEM, keyPEM, err = a.sign(template)
	if err != nil {
		return nil, nil, fmt.Errorf("making a client certificate for %s: %w", user, err)
	}
	return certPEM, keyPEM, nil
}

// servingCertificate certifies a server for host names and IP addresses.
func (a *authority) servingCertificate(name string, hosts []string) (certPEM, keyPEM []byte, err error) {
	template := certificateTemplate(pkix.Name{CommonName: name})
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	certPEM, keyPEM, err = a.sign(template)
	if err != nil {
		return nil, nil, fmt.Errorf("making a serving certificate for %s: %w", name, err)
	}
	return certPEM, keyPEM, nil
}

func certificateTemplate(subject pkix.Name) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		Subject:   subject,
		NotBefore: now.Add(-time.Hour), // clocks of other processes may differ a little
		NotAfter:  now.Add(certificateLife),
	}
}

// sign makes a key and a certificate for it. An authority without a certificate
// signs its own.
func (a *authority) sign(template *x509.Certificate) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, nil, err
	}
	parent, parentKey := a.cert, a.key
	if parent == nil {
		parent, parentKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	if err != nil {
		return nil, nil, err
	}
	if a.cert == nil {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			return nil, nil, err
		}
		a.key = key
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), nil
}

// clientCertificates is envtest's way to authenticate users, on an authority
// whose files other components need too.
type clientCertificates struct {
	ca     *authority
	caFile string
}

var _ envtest.Authn = &clientCertificates{}

// Configure makes the API server trust the authority.
func (c *clientCertificates) Configure(workDir string, args *envtest.Arguments) error {
	c.caFile = filepath.Join(workDir, "client-ca.crt")
	args.Set("client-ca-file", c.caFile)
	return nil
}

// Start writes the authority's certificate where the API server reads it.
func (c *clientCertificates) Start() error {
	return os.WriteFile(c.caFile, c.ca.certPEM, 0o644)
}

// AddUser returns the configuration with a client certificate for the user.
func (c *clientCertificates) AddUser(user envtest.User, base *rest.Config) (*rest.Config, error) {
	certPEM, keyPEM, err := c.ca.clientCertificate(user.Name, user.Groups)
	if err != nil {
		return nil, err
	}
	config := rest.CopyConfig(base)
	config.CertData, config.KeyData = certPEM, keyPEM
	return config, nil
}

// Stop does nothing: the files are removed with the cluster's folder.
func (c *clientCertificates) Stop() error { return nil }
