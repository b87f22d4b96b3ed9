// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/internal/localcluster/hollow"
)

// StartHollowNode starts a kubelet without containers, with our agent beside it, which gets the arguments.
func (l *Lab) StartHollowNode(ctx context.Context, name, nvml string, args ...string) (*hollow.Kubelet, error) {
	config, err := l.NodeConfig(name)
	if err != nil {
		return nil, err
	}
	agent := localcluster.AgentOptions{
		Binary:   l.options.Agent,
		NodeName: name,
		NVML:     nvml,
		Root:     filepath.Join(l.Dir(), "hollow", name),
		Args:     args,
	}
	agent.KubeletRootDir = filepath.Join(agent.Root, "kubelet")
	agent.CDIRoot = filepath.Join(agent.Root, "cdi")
	agent.StateDir = filepath.Join(agent.Root, "state")
	kubelet, err := hollow.Start(ctx, config, hollow.Options{Name: name, Root: agent.KubeletRootDir, CDIRoot: agent.CDIRoot})
	if err != nil {
		return nil, err
	}
	if err := l.OnStop("hollow node "+name, kubelet.Stop); err != nil {
		return nil, err
	}
	process, err := l.StartNodeAgent(ctx, agent)
	if err != nil {
		return nil, err
	}
	l.nodes[name] = &labNode{
		name:     name,
		nvml:     nvml,
		agentLog: process.LogPath(), stateDir: agent.StateDir, agent: process,
		sight: func(_ context.Context, pod *corev1.Pod) (Sight, error) {
			seen, ok := kubelet.Seen(pod.UID)
			main := slices.IndexFunc(seen.Containers, func(c hollow.Container) bool { return c.Name == pod.Spec.Containers[0].Name })
			if !ok || main < 0 {
				return Sight{}, fmt.Errorf("hollow node %s does not run pod %s", name, pod.Name)
			}
			return hollowSight(seen.Containers[main]), nil
		},
		leavings: leavings(agent.CDIRoot, agent.StateDir),
	}
	return kubelet, nil
}

// hollowSight reads the edits that the container would have got.
func hollowSight(container hollow.Container) Sight {
	sight := Sight{Hollow: true, VisibleDevices: splitDevices(container.Getenv("NVIDIA_VISIBLE_DEVICES"))}
	for _, device := range container.Devices {
		match := gpuNode.FindStringSubmatch(device.Path)
		if match == nil {
			continue
		}
		if device.Type != "c" {
			sight.Problems = append(sight.Problems, fmt.Sprintf("%s is of type %q, not a character device", device.Path, device.Type))
			continue
		}
		minor, _ := strconv.Atoi(match[1])
		sight.Minors = append(sight.Minors, minor)
	}
	return sight
}
