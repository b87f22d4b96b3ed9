// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"slices"

	"k8s.io/apimachinery/pkg/util/sets"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"stowage.dev/stowage/pkg/topology"
)

// preferred are the devices that a container should get: those whose GPUs are closest to each other, and of replicas those whose
// GPUs have fewest in use. It is nil where there is no best set, or what is asked makes no sense: then the kubelet chooses by
// itself, while after an error it fails the pod.
func preferred(resource *Resource, request *pluginapi.ContainerPreferredAllocationRequest) []string {
	switch {
	case resource.Shared:
		return leastShared(resource, request)
	case resource.Table == nil:
		return nil
	}
	byGPU := map[int]string{}
	gpus := func(ids []string) (list []int, ok bool) {
		for _, id := range ids {
			at := slices.IndexFunc(resource.Devices, func(d Device) bool { return d.ID == id })
			if at < 0 {
				return nil, false
			}
			gpu := resource.Devices[at].GPU
			if other, taken := byGPU[gpu]; taken && other != id {
				return nil, false // two devices of one GPU are as close as can be
			}
			byGPU[gpu] = id
			list = append(list, gpu)
		}
		return list, true
	}
	available, ok := gpus(request.GetAvailableDeviceIDs())
	if !ok {
		return nil
	}
	must, ok := gpus(request.GetMustIncludeDeviceIDs())
	if !ok {
		return nil
	}
	best, _, err := best(resource.Table, available, must, int(request.GetAllocationSize()))
	if err != nil {
		return nil
	}
	ids := make([]string, 0, len(best))
	for _, gpu := range best {
		ids = append(ids, byGPU[gpu])
	}
	return ids
}

// leastShared adds one replica after the other to those that must be in the set, each of a GPU that has fewest in use then; of several GPUs
// it is the first. So GPUs are shared as late, and as evenly, as can be.
func leastShared(resource *Resource, request *pluginapi.ContainerPreferredAllocationRequest) []string {
	must, size := request.GetMustIncludeDeviceIDs(), int(request.GetAllocationSize())
	free, inUse := map[string][]string{}, map[string]int{} // by UUID
	unknown := sets.New(request.GetAvailableDeviceIDs()...).Insert(must...)
	available := sets.New(request.GetAvailableDeviceIDs()...).Delete(must...)
	var gpus []string
	for _, device := range resource.Devices {
		unknown.Delete(device.ID)
		if !slices.Contains(gpus, device.UUID) {
			gpus = append(gpus, device.UUID)
		}
		if available.Has(device.ID) {
			free[device.UUID] = append(free[device.UUID], device.ID)
		} else {
			inUse[device.UUID]++
		}
	}
	if len(unknown) > 0 || size < len(must) || size > len(must)+len(available) {
		return nil
	}
	ids := slices.Clone(must)
	for len(ids) < size {
		left := slices.DeleteFunc(slices.Clone(gpus), func(uuid string) bool { return len(free[uuid]) == 0 })
		uuid := slices.MinFunc(left, func(a, b string) int { return cmp.Compare(inUse[a], inUse[b]) })
		ids, free[uuid] = append(ids, free[uuid][0]), free[uuid][1:]
		inUse[uuid]++
	}
	return ids
}

// best takes what must be in the set for available, too: the kubelet lists it there, and need not.
func best(table *topology.Table, available, must []int, size int) ([]int, topology.Score, error) {
	return table.Best(slices.Concat(available, must), must, size)
}
