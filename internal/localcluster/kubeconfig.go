// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
)

// tokenLife is how long service account tokens are valid. Nothing renews them.
const tokenLife = 24 * time.Hour

// ServiceAccountKubeconfig writes a kubeconfig file with a token of a service
// account, from the TokenRequest API, and returns its path. When bound is not
// nil the token is bound to that Pod, Node or Secret (its UID may be left out
// for a Node) and ends with it; a token that is bound to a node or a pod
// carries the node's name, as an agent's does in a DaemonSet.
func (c *Cluster) ServiceAccountKubeconfig(ctx context.Context, namespace, name string,
	bound *authenticationv1.BoundObjectReference,
) (string, error) {
	config, err := c.ServiceAccountConfig(ctx, namespace, name, bound)
	if err != nil {
		return "", err
	}
	return c.writeKubeconfig(c.uniqueName(namespace+"."+name), config)
}

// ServiceAccountConfig is ServiceAccountKubeconfig for a client in this
// process.
func (c *Cluster) ServiceAccountConfig(ctx context.Context, namespace, name string,
	bound *authenticationv1.BoundObjectReference,
) (*rest.Config, error) {
	if bound != nil && bound.Kind == "Node" && bound.UID == "" {
		node, err := c.adminClient.CoreV1().Nodes().Get(ctx, bound.Name, metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("requesting a token of service account %s/%s bound to node %s: %w", namespace, name, bound.Name, err)
		}
		bound = bound.DeepCopy()
		bound.UID = node.UID
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		ExpirationSeconds: ptr.To(int64(tokenLife / time.Second)),
		BoundObjectRef:    bound,
	}}
	answer, err := c.adminClient.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, name, request, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("requesting a token of service account %s/%s: %w", namespace, name, err)
	}
	config := c.anonymousConfig()
	config.BearerToken = answer.Status.Token
	return config, nil
}

// NodeConfig connects as a node's kubelet: user system:node:<name> in group
// system:nodes.
func (c *Cluster) NodeConfig(name string) (*rest.Config, error) {
	certPEM, keyPEM, err := c.plane.clients.clientCertificate("system:node:"+name, []string{"system:nodes"})
	if err != nil {
		return nil, err
	}
	config := c.anonymousConfig()
	config.CertData, config.KeyData = certPEM, keyPEM
	return config, nil
}

// NodeKubeconfig writes NodeConfig to a kubeconfig file and returns its path.
func (c *Cluster) NodeKubeconfig(name string) (string, error) {
	config, err := c.NodeConfig(name)
	if err != nil {
		return "", err
	}
	return c.writeKubeconfig("node."+name, config)
}

// anonymousConfig knows the API server and its certificate, and no user.
func (c *Cluster) anonymousConfig() *rest.Config {
	config := rest.AnonymousClientConfig(c.admin)
	config.QPS, config.Burst = 0, 0
	config.UserAgent = ""
	return config
}

// CreateNamespace makes a namespace, if it does not exist, and waits until
// pods can be created in it.
func (c *Cluster) CreateNamespace(ctx context.Context, name string) error {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := c.adminClient.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating namespace %s: %w", name, err)
	}
	if c.options.WithoutControllerManager {
		return nil
	}
	return c.waitForServiceAccount(ctx, name)
}

func (c *Cluster) writeKubeconfig(name string, config *rest.Config) (string, error) {
	const entry = "stowage"
	data, err := clientcmd.Write(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{entry: {
			Server:                   config.Host,
			CertificateAuthorityData: config.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{entry: {
			ClientCertificateData: config.CertData,
			ClientKeyData:         config.KeyData,
			Token:                 config.BearerToken,
		}},
		Contexts:       map[string]*clientcmdapi.Context{entry: {Cluster: entry, AuthInfo: entry}},
		CurrentContext: entry,
	})
	if err != nil {
		return "", fmt.Errorf("writing kubeconfig %s: %w", name, err)
	}
	return c.writeFile(data, "kubeconfigs", filepath.Base(name)+".kubeconfig")
}
