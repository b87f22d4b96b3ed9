// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	kubeletconfig "k8s.io/kubelet/config/v1beta1"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

const janitorPackage = "stowage.dev/stowage/internal/localcluster/node/enclosure/janitor"

var errStopped = errors.New("the node has been stopped")

// Options say how to start a node.
type Options struct {
	// Name is the Node object's name. Required.
	Name string
	// Labels are set on the Node object.
	Labels map[string]string
	// Binds are further places of the machine in which the node sees something else, as a kernel with a driver.
	Binds []enclosure.Bind
	// Agent is the node agent. Without a binary no agent is started; StartAgent cannot be called then.
	Agent Agent
	// NUMANodes is how many NUMA nodes the kubelet sees, with an equal share of the machine's CPUs and memory each; 0 is as many as there are.
	NUMANodes int
	// Kubelet changes the kubelet's configuration before each of its starts; nil leaves it as it is.
	Kubelet func(*kubeletconfig.KubeletConfiguration)
}

// Agent says how to run the node agent.
type Agent struct {
	// Binary is the path of the built cmd/node-agent.
	Binary string
	// NVML is the agent's --nvml flag, for instance "sim:dgx-h100".
	NVML string
	// Namespace and ServiceAccount name the agent's identity; by default stowage-node-agent, both. Both must exist.
	Namespace      string
	ServiceAccount string
	// Args are further arguments.
	Args []string
	// Env is added to our environment.
	Env []string
}

// Node is a running node.
type Node struct {
	name     string
	options  Options
	cluster  *localcluster.Cluster
	binaries localcluster.Binaries
	layout   layout
	network  network
	cgroup   string
	archive  string // of the test images

	mu         sync.Mutex // guards what comes and goes; held while the node starts, as a whole, and while it shuts down
	kubeconfig string     // of the kubelet
	enclosure  *enclosure.Enclosure
	containerd *localcluster.Process
	kubelet    *localcluster.Process
	agent      *RunningAgent   // the one that was started last
	former     []*RunningAgent // that StartNextAgent has replaced
	agents     int             // started so far

	cancel   context.CancelCauseFunc // makes start give up
	stopOnce sync.Once
	stopErr  error
}

// Start starts a node and waits until it is Ready, and until its agent runs. It is stopped by Stop, by the cluster's
// Stop, or when ctx ends; Stop must be called in each case, as it waits for the end and tells what was left. When Start
// fails it has stopped what it had started.
func Start(ctx context.Context, cluster *localcluster.Cluster, options Options) (*Node, error) {
	if err := checkMachine(); err != nil {
		return nil, fmt.Errorf("starting node %s: %w", options.Name, err)
	}
	n := &Node{
		name:    options.Name,
		options: options,
		cluster: cluster,
		layout:  layout{dir: filepath.Join(cluster.Dir(), "nodes", options.Name)},
		// Several clusters may run on one machine, and names of nodes repeat.
		cgroup: fmt.Sprintf("/stowage-%d-%s", os.Getpid(), options.Name),
	}
	startCtx, cancel := context.WithCancelCause(ctx)
	n.options.Agent = n.options.Agent.withDefaults()
	n.cancel = cancel
	context.AfterFunc(ctx, func() { n.Stop() })
	err := cluster.OnStop("node "+n.name, n.Stop)
	if err == nil {
		err = n.start(startCtx)
	}
	if cause := cmp.Or(context.Cause(ctx), context.Cause(startCtx)); err != nil && cause != nil {
		err = fmt.Errorf("%w: %w", cause, err) // what failed because of that says so only in its own words
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting node %s: %w", n.name, err), n.Stop())
	}
	return n, nil
}

func (n *Node) start(ctx context.Context) (err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	begin := time.Now()
	if n.binaries, err = localcluster.EnsureBinaries(ctx, n.cluster.Progress(), localcluster.Node); err != nil {
		return err
	}
	if err := n.layout.make(); err != nil {
		return err
	}
	if n.archive, err = image.Build(ctx, n.layout.path("images")); err != nil {
		return err
	}
	if n.network, err = freeNetwork(); err != nil {
		return err
	}
	if err := n.network.writeCNI(n.layout); err != nil {
		return err
	}
	if err := n.enclose(ctx); err != nil {
		return err
	}
	if err := n.startContainerd(ctx); err != nil {
		return err
	}
	if n.kubeconfig, err = n.cluster.NodeKubeconfig(n.name); err != nil {
		return err
	}
	if err := n.startKubelet(ctx); err != nil {
		return err
	}
	if err := n.provideAddress(ctx); err != nil {
		return err
	}
	if err := n.waitReady(ctx, time.Time{}); err != nil {
		return err
	}
	if n.options.Agent.Binary != "" {
		if err := n.startAgent(ctx); err != nil {
			return err
		}
	}
	fmt.Fprintf(n.cluster.Progress(), "node %s is ready after %s\n", n.name, time.Since(begin).Round(100*time.Millisecond))
	return nil
}

// enclose makes the mount namespace and the cgroup.
func (n *Node) enclose(ctx context.Context) error {
	janitor := n.layout.path("bin", "janitor")
	if err := image.Compile(ctx, janitorPackage, janitor); err != nil {
		return err
	}
	settings, err := hideSettings(n.layout)
	if err != nil {
		return err
	}
	numa, err := showNUMANodes(n.layout, systemFolder, n.options.NUMANodes)
	if err != nil {
		return err
	}
	bootID, err := newBootID(n.layout)
	if err != nil {
		return err
	}
	spec := enclosure.Spec{
		Binds:  slices.Concat(n.layout.shared(), settings, n.options.Binds, numa, []enclosure.Bind{bootID}),
		Cgroup: n.cgroup,
	}
	n.enclosure, err = enclosure.Start(ctx, janitor, n.layout.dir, spec)
	return err
}

// checkMachine says why no node can run here.
func checkMachine() error {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("a real node needs Linux, this is %s: use hollow nodes", runtime.GOOS)
	}
	if os.Geteuid() != 0 {
		return fmt.Errorf("a real node needs root, for namespaces, mounts and cgroups; this is user %d: use hollow nodes", os.Geteuid())
	}
	return localcluster.ForeignKubelet()
}

// Name is the name of the Node object.
func (n *Node) Name() string { return n.name }

// CDIDir is the folder with the CDI specs of the node, as seen from outside.
func (n *Node) CDIDir() string { return n.layout.cdi() }

// KubeletDir is the kubelet's root, with the sockets of device plugins below it.
func (n *Node) KubeletDir() string { return n.layout.kubelet() }

// StateDir is the agent's ledger folder, as seen from outside.
func (n *Node) StateDir() string { return n.layout.agentState() }

// DeviceDir is the folder in which a simulating agent makes device nodes.
func (n *Node) DeviceDir() string { return n.layout.devices() }

// LogFile is the log of one of the node's programs: "kubelet", "containerd" or "agent".
func (n *Node) LogFile(program string) string {
	return filepath.Join(n.cluster.LogDir(), n.name+"-"+program+".log")
}

// Processes are the node's containerd, kubelet and agent, as far as they run.
func (n *Node) Processes() (all []*localcluster.Process) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, process := range []*localcluster.Process{n.containerd, n.kubelet} {
		if process != nil {
			all = append(all, process)
		}
	}
	if n.agent != nil {
		all = append(all, n.agent.Process)
	}
	return all
}

// Enter is the command that runs a program inside the node, where its folders stand in their usual places. Path must be absolute.
func (n *Node) Enter(path string, args ...string) []string {
	program, all := n.enclosure.Wrap(path, args...)
	return append([]string{program}, all...)
}

// Stop ends the node, takes everything away that belongs to it, and returns as an error what is left or had gone wrong. The Node object
// and its pods are removed from the API server too, if there still is one. It returns when all is done; further and concurrent calls wait
// for the first.
func (n *Node) Stop() error {
	n.stopOnce.Do(func() {
		n.cancel(errStopped)
		n.stopErr = n.shutDown()
		if n.stopErr != nil {
			n.stopErr = fmt.Errorf("stopping node %s: %w", n.name, n.stopErr)
		}
	})
	return n.stopErr
}

func (n *Node) shutDown() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var errs []error
	// Against the order of their start, and the kubelet before containerd, or it would bring back what is killed.
	for _, agent := range append(n.former, n.agent) {
		if agent != nil {
			errs = append(errs, agent.Err(), agent.Stop())
		}
	}
	for _, process := range []*localcluster.Process{n.kubelet, n.containerd} {
		if process != nil {
			errs = append(errs, process.Err(), process.Stop())
		}
	}
	if n.enclosure != nil {
		errs = append(errs, n.enclosure.Stop())
	}
	errs = append(errs, n.removeObjects(), n.leftovers(), n.layout.remove())
	return errors.Join(errs...)
}

// readyCondition is nil while the kubelet has not reported.
func readyCondition(node *corev1.Node) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == corev1.NodeReady {
			return &node.Status.Conditions[i]
		}
	}
	return nil
}
