// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/internal/localcluster"
)

// agentGracePeriod is that of our DaemonSet's pods: the agent answers the kubelet's calls that are under way before it ends.
const agentGracePeriod = 30 * time.Second

func (a Agent) withDefaults() Agent {
	if a.Namespace == "" {
		a.Namespace = "stowage-node-agent"
	}
	if a.ServiceAccount == "" {
		a.ServiceAccount = "stowage-node-agent"
	}
	return a
}

// StartAgent starts the node agent, with these arguments after its own, and waits until it says that
// it is ready. It is an error if one runs.
func (n *Node) StartAgent(ctx context.Context, args ...string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.startAgent(ctx, args...)
}

// StartNextAgent starts another agent beside the one that runs, as a DaemonSet does that is updated with maxSurge 1, and waits until it is
// ready. It is the node's agent then; the caller ends the former one with Stop.
func (n *Node) StartNextAgent(ctx context.Context) (former *RunningAgent, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	former = n.agent
	if former == nil {
		return nil, errors.New("the agent does not run")
	}
	n.agent = nil
	if err := n.startAgent(ctx); err != nil {
		n.agent = former
		return nil, err
	}
	n.former = append(n.former, former)
	return former, nil
}

// Agent is the agent that was started last, nil if none runs.
func (n *Node) Agent() *RunningAgent {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.agent
}

// RunningAgent is one agent of a node.
type RunningAgent struct {
	*localcluster.Process
	url    string
	client *http.Client
}

// Get returns what the agent serves the administrator on a path, for instance "/metrics".
func (a *RunningAgent) Get(ctx context.Context, path string) ([]byte, error) {
	return get(ctx, a.client, a.URL(path))
}

// URL is where the agent serves path, over TLS.
func (a *RunningAgent) URL(path string) string { return a.url + path }

func (n *Node) startAgent(ctx context.Context, args ...string) error {
	if n.options.Agent.Binary == "" {
		return errors.New("the node was started without an agent binary")
	}
	if n.agent != nil {
		return fmt.Errorf("the agent runs already, as process %d", n.agent.Pid())
	}
	n.agents++
	// Bound to the Node object: RBAC's and admission's node checks read the node from the token.
	node, err := n.cluster.AdminClient().CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	kubeconfig, err := n.cluster.ServiceAccountKubeconfig(ctx, n.options.Agent.Namespace, n.options.Agent.ServiceAccount,
		&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID})
	if err != nil {
		return fmt.Errorf("making the agent's identity: %w", err)
	}
	port, err := localcluster.FreePort()
	if err != nil {
		return err
	}
	address := fmt.Sprintf("127.0.0.1:%d", port)
	serving, client, err := n.cluster.Serving(fmt.Sprintf("%s-agent-%d", n.name, n.agents))
	if err != nil {
		return err
	}
	agent := &RunningAgent{url: "https://" + address, client: client}
	path, all := n.enclosure.Wrap(n.options.Agent.Binary, slices.Concat([]string{
		"--kubeconfig=" + kubeconfig,
		"--node-name=" + n.name,
		// As in a pod: two agents may run at once.
		fmt.Sprintf("--pod-uid=%s-%d", n.name, n.agents),
		"--nvml=" + n.options.Agent.NVML,
		"--kubelet-root-dir=" + kubeletRoot,
		"--cdi-root=" + cdiRoot,
		"--state-dir=" + n.layout.agentState(),
		"--dev-root=" + n.layout.devices(),
		"--health-address=" + address,
	}, serving, n.options.Agent.Args, args)...)
	agent.Process, err = localcluster.StartProcess(ctx, localcluster.Command{
		Name:        n.name + "-agent",
		Path:        path,
		Args:        all,
		Env:         n.options.Agent.Env,
		LogFile:     n.LogFile("agent"),
		Ready:       func(ctx context.Context) error { return healthy(ctx, client, agent.URL("/readyz")) },
		StopTimeout: agentGracePeriod,
	})
	if err == nil {
		n.agent = agent
	}
	return err
}

// SimulationDir is the folder of the node's simulated GPUs, with their control socket (pkg/nvmlsim).
func (n *Node) SimulationDir() string { return filepath.Join(n.layout.agentState(), "sim") }

// StopAgent ends the agent in an orderly way.
func (n *Node) StopAgent() error {
	return n.endAgent((*RunningAgent).Stop)
}

// KillAgent ends the agent with SIGKILL: a crash.
func (n *Node) KillAgent() error {
	return n.endAgent((*RunningAgent).Kill)
}

// SignalAgent sends the agent a signal, for instance SIGSTOP to make it hang.
func (n *Node) SignalAgent(signal syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent == nil {
		return errors.New("the agent does not run")
	}
	return n.agent.Signal(signal)
}

func (n *Node) endAgent(end func(*RunningAgent) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent == nil {
		return errors.New("the agent does not run")
	}
	err := errors.Join(n.agent.Err(), end(n.agent))
	n.agent = nil
	return err
}
