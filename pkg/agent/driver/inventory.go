// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"strings"
	"sync"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// inventory is what the last look has found, by the names that it is published with.
type inventory struct {
	mu     sync.Mutex
	policy discovery.Policy
	node   *discovery.Node // nil before the first look
	// noPassthrough is why GPUs are not offered to virtual machines, as it was last said.
	noPassthrough map[string]string
}

// offer sets what is offered of GPUs that are found from now on.
func (i *inventory) offer(policy discovery.Policy) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.policy = policy
}

// offered is what is offered of GPUs that are found now.
func (i *inventory) offered() discovery.Policy {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.policy
}

func (i *inventory) set(node *discovery.Node) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.node = node
}

// found is nil before the first look. Nobody changes it.
func (i *inventory) found() *discovery.Node {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.node
}

// gpu is the GPU of that name, nil if there is none.
func (i *inventory) gpu(name string) *discovery.GPU {
	if node := i.found(); node != nil {
		for n := range node.GPUs {
			if node.GPUs[n].Name == name {
				return &node.GPUs[n]
			}
		}
	}
	return nil
}

// instanceOf returns the MIG device, and its GPU, that a published device was at the last look; nil if it is none.
func (i *inventory) instanceOf(device string) (gpu string, instance *nvml.Instance) {
	node := i.found()
	if node == nil {
		return "", nil
	}
	found, offer, err := node.Find(device)
	if err != nil {
		return "", nil
	}
	return found.Name, found.InstanceOf(offer)
}

func (i *inventory) gpuOf(device string) string {
	if node := i.found(); node != nil {
		for _, gpu := range node.GPUs {
			if strings.HasPrefix(device, gpu.Name+"-") {
				return gpu.Name
			}
		}
	}
	return device
}

// devices are the GPUs by name, each with its MIG devices that there are, by the name that they are published with.
func (i *inventory) devices() map[string]map[string]*nvml.Instance {
	node := i.found()
	if node == nil {
		return nil
	}
	devices := map[string]map[string]*nvml.Instance{}
	for n := range node.GPUs {
		gpu := &node.GPUs[n]
		partitions := map[string]*nvml.Instance{}
		for o := range gpu.Offers {
			if instance := gpu.InstanceOf(&gpu.Offers[o]); instance != nil {
				partitions[gpu.Offers[o].Name] = instance
			}
		}
		devices[gpu.Name] = partitions
	}
	return devices
}

// placeOf is where a device of a ResourceSlice is. Of one that is not offered now no more is known than the GPU.
func (i *inventory) placeOf(device string) (gpu string, at *ledger.Partition) {
	if node := i.found(); node != nil {
		if found, offer, err := node.Find(device); err == nil {
			return found.Name, placeOf(offer)
		}
	}
	return i.gpuOf(device), nil
}

// tellPassthrough says why GPUs are not offered to virtual machines, when that has changed.
func (i *inventory) tellPassthrough(ctx context.Context, node *discovery.Node) {
	now := map[string]string{}
	for _, gpu := range node.GPUs {
		now[gpu.Name] = gpu.NoPassthrough
	}
	i.mu.Lock()
	before := i.noPassthrough
	i.noPassthrough = now
	i.mu.Unlock()
	for _, gpu := range node.GPUs {
		if reason := gpu.NoPassthrough; reason != "" && reason != before[gpu.Name] {
			klog.FromContext(ctx).Info("GPU is not offered to virtual machines", "device", gpu.Name, "reason", reason)
		}
	}
}
