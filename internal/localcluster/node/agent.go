package node

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/internal/localcluster"
)

func (a Agent) withDefaults() Agent {
	if a.Namespace == "" {
		a.Namespace = "stowage-system"
	}
	if a.ServiceAccount == "" {
		a.ServiceAccount = "stowage-node-agent"
	}
	return a
}

// StartAgent starts the node agent and waits until it says that it is ready. It is an error if one runs.
func (n *Node) StartAgent(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.startAgent(ctx)
}

func (n *Node) startAgent(ctx context.Context) error {
	if n.agentOpt.Binary == "" {
		return errors.New("the node was started without an agent binary")
	}
	if n.agent != nil {
		return fmt.Errorf("the agent runs already, as process %d", n.agent.Pid())
	}
	// Bound to the Node object: RBAC's and admission's node checks read the node from the token.
	node, err := n.cluster.AdminClient().CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	kubeconfig, err := n.cluster.ServiceAccountKubeconfig(ctx, n.agentOpt.Namespace, n.agentOpt.ServiceAccount,
		&authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID})
	if err != nil {
		return fmt.Errorf("making the agent's identity: %w", err)
	}
	ports, err := freePorts(1)
	if err != nil {
		return err
	}
	address := fmt.Sprintf("127.0.0.1:%d", ports[0])
	path, args := n.enclosure.Wrap(n.agentOpt.Binary, append([]string{
		"--kubeconfig=" + kubeconfig,
		"--node-name=" + n.name,
		"--nvml=" + n.agentOpt.NVML,
		"--kubelet-root-dir=" + kubeletRoot,
		"--cdi-root=" + cdiRoot,
		"--state-dir=" + n.layout.agentState(),
		"--dev-root=" + n.layout.devices(),
		"--health-address=" + address,
	}, n.agentOpt.Args...)...)
	n.agent, err = localcluster.StartProcess(ctx, localcluster.Command{
		Name:    n.name + "-agent",
		Path:    path,
		Args:    args,
		LogFile: n.LogFile("agent"),
		Ready:   func(ctx context.Context) error { return healthy(ctx, "http://"+address+"/readyz") },
	})
	return err
}

// StopAgent ends the agent in an orderly way.
func (n *Node) StopAgent() error {
	return n.endAgent((*localcluster.Process).Stop)
}

// KillAgent ends the agent with SIGKILL: a crash.
func (n *Node) KillAgent() error {
	return n.endAgent((*localcluster.Process).Kill)
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

func (n *Node) endAgent(end func(*localcluster.Process) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.agent == nil {
		return errors.New("the agent does not run")
	}
	err := errors.Join(n.agent.Err(), end(n.agent))
	n.agent = nil
	return err
}
