// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/install"
)

// labNode is a node of either kind.
type labNode struct {
	name, nvml string
	// agentLog and stateDir are where the node's agent logs and keeps its state.
	agentLog, stateDir string
	// simDir keeps the GPUs' state where the node has partitions, which come and go; empty where it has not.
	simDir string
	// sight tells what a running pod's container was given.
	sight func(ctx context.Context, pod *corev1.Pod) (Sight, error)
	// processes are those that the cluster does not watch itself, and agent is the node's agent.
	processes []*localcluster.Process
	agent     *localcluster.Process
	// enter is the command that runs a program inside, where another boot ID is seen; nil where there is no inside.
	enter func(path string, args ...string) []string
	// leavings are patterns of files that exist only while claims are prepared.
	leavings []string
}

// StartRealNode starts a kubelet and containerd with simulated GPUs, and our agent with the arguments. It needs root.
func (l *Lab) StartRealNode(ctx context.Context, name, nvml string, args ...string) (*node.Node, error) {
	if l.options.Library != "" {
		profile, err := nvmlsim.LoadProfile(strings.TrimPrefix(nvml, "sim:"))
		if err != nil {
			return nil, err
		}
		if err := l.InstallDriver(name, profile.System.DriverVersion); err != nil {
			return nil, err
		}
		args = append(args, "--sim-library="+l.Library(name))
	}
	n, err := node.Start(ctx, l.Cluster, node.Options{
		Name:  name,
		Agent: node.Agent{Binary: l.options.Agent, NVML: nvml, Args: args},
	})
	if err != nil {
		return nil, err
	}
	started := &labNode{
		name:     name,
		nvml:     nvml,
		agentLog: n.LogFile("agent"), stateDir: n.StateDir(),
		sight: func(ctx context.Context, pod *corev1.Pod) (Sight, error) {
			return l.probe(ctx, n, pod)
		},
		leavings:  leavings(n.CDIDir(), n.StateDir()),
		processes: n.Processes(), agent: n.Agent().Process, enter: n.Enter,
	}
	if slices.Contains(args, "--partitions=dynamic") {
		started.simDir = n.SimulationDir()
	}
	l.nodes[name] = started
	delete(l.known, name)
	return n, nil
}

// InstallDriver puts the library of a driver's version where a real node's agent loads it from, as a package manager does: who has loaded
// the one before keeps it. The version that the kernel has loaded is nvmlsim.LoadDriver's.
func (l *Lab) InstallDriver(node, version string) error {
	if err := os.MkdirAll(filepath.Dir(l.Library(node)), 0o755); err != nil {
		return err
	}
	return install.Library(l.options.Library, l.Library(node), version)
}

// Library is where that is.
func (l *Lab) Library(node string) string {
	return filepath.Join(l.Dir(), "drivers", node, "libnvidia-ml.so.1")
}

// NodePlaces are where the files of a node's agent are.
type NodePlaces struct {
	Node string
	// AgentLog is the agent's log file, StateDir its ledger and records.
	AgentLog, StateDir string
	// SimulatorSocket is what nvmlsimctl takes as --socket.
	SimulatorSocket string
	// AgentPID is the agent's process, and Enter the command that runs a shell inside the node; empty for a hollow one.
	AgentPID int
	Enter    []string
}

// Places tells where the files of all nodes are, by name.
func (l *Lab) Places() []NodePlaces {
	var places []NodePlaces
	for _, name := range slices.Sorted(maps.Keys(l.nodes)) {
		n := l.nodes[name]
		place := NodePlaces{
			Node: name, AgentLog: n.agentLog, StateDir: n.stateDir, SimulatorSocket: filepath.Join(n.stateDir, "sim", "control.sock"),
			AgentPID: n.agent.Pid(),
		}
		if n.enter != nil {
			place.Enter = n.enter("/bin/sh")
		}
		places = append(places, place)
	}
	return places
}

// Watch tells of each program that ends by itself, with its log, until ctx ends: of the control plane, of the scheduler, and of nodes. It
// returns when nothing is told any more.
func (l *Lab) Watch(ctx context.Context, tell func(*localcluster.ExitError)) {
	var all sync.WaitGroup
	defer all.Wait()
	all.Go(func() { localcluster.WatchPlane(ctx, l.Cluster, tell) })
	for _, n := range l.nodes {
		for _, process := range n.processes {
			all.Go(func() {
				var exit *localcluster.ExitError
				if err := process.Wait(ctx); errors.As(err, &exit) {
					tell(exit)
				}
			})
		}
	}
}

// leavings are the files of prepared claims: CDI specs and ledger entries. The
// ledger's folder also has locks, which stay.
func leavings(cdiDir, stateDir string) []string {
	return []string{
		filepath.Join(cdiDir, "*"),
		filepath.Join(stateDir, "claims", "*"),
		filepath.Join(stateDir, "metadata", "*", "*"),
	}
}

// printTimeout is how long a container that is reported to run may need to print, on a busy machine.
const printTimeout = 2 * time.Minute

// probe reads what the container itself printed. It waits for that: a container runs before its program does.
func (l *Lab) probe(ctx context.Context, n *node.Node, pod *corev1.Pod) (Sight, error) {
	var printed *report.Report
	var unread error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, printTimeout, true, func(ctx context.Context) (bool, error) {
		var log string
		if log, unread = n.PodLogs(ctx, pod.Namespace, pod.Name, pod.Spec.Containers[0].Name); unread == nil {
			printed, unread = report.Last(strings.NewReader(log))
		}
		return unread == nil, nil
	})
	if err != nil {
		return Sight{}, fmt.Errorf("pod %s: %w", pod.Name, both(err, unread))
	}
	return sightOf(printed), nil
}

var gpuNode = regexp.MustCompile(`^/dev/nvidia([0-9]+)$`)

// sightOf reads a container's report. A GPU's node counts only if the container
// can open it up to the missing driver: the devices cgroup admits it.
func sightOf(printed *report.Report) Sight {
	sight := Sight{VisibleDevices: splitDevices(printed.VisibleDevices), Told: printed.Told}
	for _, device := range printed.Devices {
		match := gpuNode.FindStringSubmatch(device.Path)
		if match == nil {
			continue
		}
		switch {
		case device.Type != "char":
			sight.Problems = append(sight.Problems, fmt.Sprintf("%s is a %s node, not a character device", device.Path, device.Type))
		case device.Open != report.Admitted && device.Open != report.Opened:
			sight.Problems = append(sight.Problems, fmt.Sprintf("%s: open gives %s", device.Path, device.Open))
		default:
			minor, _ := strconv.Atoi(match[1])
			sight.Minors = append(sight.Minors, minor)
		}
	}
	return sight
}

func splitDevices(value string) []string {
	if value == "" {
		return nil
	}
	return strings.Split(value, ",")
}
