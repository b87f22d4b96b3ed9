// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// startControllerManager starts kube-controller-manager as its own user; each
// controller in it acts as its own service account.
func (c *Cluster) startControllerManager(ctx context.Context) error {
	const name = "kube-controller-manager"
	kubeconfig, err := c.userKubeconfig(name, "system:"+name)
	if err != nil {
		return err
	}
	server, err := c.secureServer(name)
	if err != nil {
		return err
	}
	signingKey, err := c.writeFile(c.plane.clients.keyPEM, "client-ca.key")
	if err != nil {
		return err
	}
	args := append(server.args,
		"--kubeconfig="+kubeconfig,
		"--authentication-kubeconfig="+kubeconfig,
		"--authorization-kubeconfig="+kubeconfig,
		"--use-service-account-credentials",
		"--service-account-private-key-file="+filepath.Join(c.plane.dir, "sa-signer.key"),
		"--root-ca-file="+c.plane.caFile,
		"--cluster-signing-cert-file="+c.ClientCAFile(),
		"--cluster-signing-key-file="+signingKey,
		"--leader-elect=false",
		// Bursts of hundreds of pods must wait for schedulers, not for
		// client-side rate limits here.
		"--kube-api-qps=500", "--kube-api-burst=1000",
	)
	if gates := gatesFlag(c.options.FeatureGates); gates != "" {
		args = append(args, "--feature-gates="+gates)
	}
	_, err = c.StartProcess(ctx, Command{
		Name:  name,
		Path:  c.binaries.KubeControllerManager(),
		Args:  append(args, c.options.ControllerManagerArgs...),
		Ready: server.ready("/healthz"),
	})
	return err
}

// userKubeconfig makes a kubeconfig for a user with a client certificate.
func (c *Cluster) userKubeconfig(file, user string, groups ...string) (string, error) {
	added, err := c.plane.envtest.AddUser(envtest.User{Name: user, Groups: groups}, nil)
	if err != nil {
		return "", fmt.Errorf("adding user %s: %w", user, err)
	}
	return c.writeKubeconfig(file, added.Config())
}

// secureServer is the secure port of a Kubernetes component: arguments for the
// component, and a way to ask it.
type secureServer struct {
	port   *Port
	args   []string
	client *http.Client
}

// secureServer reserves a port, until the cluster stops, and makes a serving
// certificate.
func (c *Cluster) secureServer(name string) (*secureServer, error) {
	port, err := ReservePort()
	if err != nil {
		return nil, err
	}
	if err := c.OnStop("port of "+name, func() error { port.Release(); return nil }); err != nil {
		return nil, err
	}
	args, client, err := c.Serving(name)
	if err != nil {
		return nil, err
	}
	client.Timeout = 5 * time.Second
	return &secureServer{
		port:   port,
		args:   append([]string{"--bind-address=127.0.0.1", "--secure-port=" + port.String(), "--permit-port-sharing"}, args...),
		client: client,
	}, nil
}

// Serving returns the flags with which a server has a certificate and knows the
// administrator by one, also before the API server has published the authority,
// and the administrator's client of it, which has no timeout.
func (c *Cluster) Serving(name string) (args []string, client *http.Client, err error) {
	cert, key, err := c.ServingCertificate(name)
	if err != nil {
		return nil, nil, err
	}
	admin, err := tls.X509KeyPair(c.admin.CertData, c.admin.KeyData)
	if err != nil {
		return nil, nil, fmt.Errorf("reading the administrator's certificate: %w", err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.servingCA.certPEM)
	args = []string{"--tls-cert-file=" + cert, "--tls-private-key-file=" + key, "--client-ca-file=" + c.ClientCAFile()}
	return args, &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{
			RootCAs:      roots,
			Certificates: []tls.Certificate{admin},
			MinVersion:   tls.VersionTLS12,
		},
		DisableKeepAlives: true,
	}}, nil
}

// url is "https://127.0.0.1:<port>" with a path.
func (s *secureServer) url(path string) string { return "https://" + s.port.Address() + path }

// ready returns a check that passes when path answers 200.
func (s *secureServer) ready(path string) func(context.Context) error {
	return func(ctx context.Context) error {
		_, err := getHTTP(ctx, s.client, s.url(path))
		return err
	}
}

// getHTTP returns what the URL answers; another status than 200 is an error
// with the answer in it.
func getHTTP(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("reading the answer of %s: %w", url, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answered %s: %.1000s", url, response.Status, strings.TrimSpace(string(body)))
	}
	return body, nil
}
