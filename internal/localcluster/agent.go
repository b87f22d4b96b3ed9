// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/types"
)

// NodeAgentServiceAccount is the identity that our manifests give to the node
// agent.
var NodeAgentServiceAccount = types.NamespacedName{Namespace: "stowage-node-agent", Name: "stowage-node-agent"}

// AgentOptions say how to run a node agent outside a real node, for a hollow
// one.
type AgentOptions struct {
	// Binary is the node agent; required.
	Binary string
	// NodeName is the node that it serves, which must exist; required.
	NodeName string
	// NVML is where GPUs come from, for example "sim:dgx-h100"; required.
	NVML string
	// Root is the node's own folder; required. The agent's folders are below it
	// unless they are given.
	Root string
	// KubeletRootDir has the folders plugins and plugins_registry, which are
	// made.
	KubeletRootDir string // default <Root>/kubelet
	CDIRoot        string // default <Root>/cdi
	StateDir       string // default <Root>/state
	DevRoot        string // default <Root>/dev; simulated device nodes
	// ServiceAccount is the identity; NodeAgentServiceAccount when empty. The
	// token is bound to the node.
	ServiceAccount types.NamespacedName
	// HealthAddress is where it serves health and metrics; a free port of this
	// machine when empty.
	HealthAddress string
	// Args are further arguments.
	Args []string
	// Env is added to our environment.
	Env []string
}

func (o *AgentOptions) complete() error {
	if o.Binary == "" || o.NodeName == "" || o.NVML == "" || o.Root == "" {
		return errors.New("a binary, a node name, an NVML library and a root folder are required")
	}
	for _, dir := range []struct {
		path *string
		name string
	}{
		{&o.KubeletRootDir, "kubelet"},
		{&o.CDIRoot, "cdi"},
		{&o.StateDir, "state"},
		{&o.DevRoot, "dev"},
	} {
		if *dir.path == "" {
			*dir.path = filepath.Join(o.Root, dir.name)
		}
	}
	if o.ServiceAccount == (types.NamespacedName{}) {
		o.ServiceAccount = NodeAgentServiceAccount
	}
	return nil
}

// StartNodeAgent starts a node agent with a token that is bound to its node, as
// the one of a DaemonSet's pod is, and waits until it is ready, which it is when
// it serves its sockets. It is run again, after a Kill for example, by calling
// StartNodeAgent again.
func (c *Cluster) StartNodeAgent(ctx context.Context, o AgentOptions) (*Process, error) {
	if err := o.complete(); err != nil {
		return nil, fmt.Errorf("starting a node agent for node %q: %w", o.NodeName, err)
	}
	for _, dir := range []string{
		filepath.Join(o.KubeletRootDir, "plugins"),
		filepath.Join(o.KubeletRootDir, "plugins_registry"),
		o.CDIRoot, o.StateDir, o.DevRoot,
	} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("starting a node agent for node %s: %w", o.NodeName, err)
		}
	}
	account := o.ServiceAccount
	kubeconfig, err := c.ServiceAccountKubeconfig(ctx, account.Namespace, account.Name,
		&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: o.NodeName})
	if err != nil {
		return nil, fmt.Errorf("starting a node agent for node %s: %w", o.NodeName, err)
	}
	health := o.HealthAddress
	if health == "" {
		// The agent does not share its port.
		port, err := FreePort()
		if err != nil {
			return nil, err
		}
		health = fmt.Sprintf("127.0.0.1:%d", port)
	}

	name := c.uniqueName(strings.ReplaceAll(o.NodeName, "/", "_") + "-agent") // as on a real node
	serving, client, err := c.Serving(name)
	if err != nil {
		return nil, fmt.Errorf("starting a node agent for node %s: %w", o.NodeName, err)
	}
	client.Timeout = 5 * time.Second
	return c.StartProcess(ctx, Command{
		Name: name,
		Path: o.Binary,
		Args: append(append([]string{
			"--kubeconfig=" + kubeconfig,
			"--node-name=" + o.NodeName,
			"--nvml=" + o.NVML,
			"--kubelet-root-dir=" + o.KubeletRootDir,
			"--cdi-root=" + o.CDIRoot,
			"--state-dir=" + o.StateDir,
			"--dev-root=" + o.DevRoot,
			"--health-address=" + health,
		}, serving...), o.Args...),
		Env: o.Env,
		Ready: func(ctx context.Context) error {
			_, err := getHTTP(ctx, client, "https://"+health+"/readyz")
			return err
		},
	})
}
