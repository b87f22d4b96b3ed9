package deviceplugin

import (
	"slices"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"stowage.dev/stowage/pkg/topology"
)

// preferred are the devices that a container should get: those whose GPUs are closest to each other. It is nil where there is no
// best set, or what is asked makes no sense: then the kubelet chooses by itself, while after an error it fails the pod.
func preferred(resource *Resource, request *pluginapi.ContainerPreferredAllocationRequest) []string {
	if resource.Table == nil {
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

// best takes what must be in the set for available, too: the kubelet lists it there, and need not.
func best(table *topology.Table, available, must []int, size int) ([]int, topology.Score, error) {
	return table.Best(slices.Concat(available, must), must, size)
}
