// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// migProfile is a profile of a GPU with 7 compute and 8 memory slices.
type migProfile struct {
	name            string
	compute, memory int
	starts          []int
}

var migProfiles = []migProfile{
	{"1g", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g20", 1, 2, []int{0, 2, 4, 6}},
	{"2g", 2, 2, []int{0, 2, 4}},
	{"3g", 3, 4, []int{0, 4}},
	{"4g", 4, 4, []int{0}},
	{"7g", 7, 8, []int{0}},
}

// migWorld has one node with so many GPUs, cut into partitions of each profile at each place; kind is the number of the
// profile. Two GPUs are on one root.
func migWorld(gpus int) (*world, []resourceapi.Device) {
	var devices []resourceapi.Device
	for gpu := range gpus {
		for k, p := range migProfiles {
			for _, start := range p.starts {
				counters := map[string]resourceapi.Counter{"compute": {Value: *resource.NewQuantity(int64(p.compute), resource.DecimalSI)}}
				for m := range p.memory {
					counters[fmt.Sprintf("memory-%d", start+m)] = resourceapi.Counter{Value: resource.MustParse("1")}
				}
				of := func(n int) resourceapi.DeviceAttribute {
					return resourceapi.DeviceAttribute{IntValue: ptr.To(int64(n))}
				}
				devices = append(devices, resourceapi.Device{
					Name: fmt.Sprintf("gpu-%d-%s-%d", gpu, p.name, start),
					Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
						"kind": of(k), "gpu": of(gpu), "root": of(gpu / 2), "numa": of(gpu * 2 / gpus),
					},
					ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: fmt.Sprintf("gpu-%d", gpu), Counters: counters}},
				})
			}
		}
	}
	w := rig().node("n1", devices...)
	slice := w.slices[0].DeepCopy()
	slice.Name, slice.Spec.Devices = "counters", nil
	for gpu := range gpus {
		set := resourceapi.CounterSet{Name: fmt.Sprintf("gpu-%d", gpu), Counters: map[string]resourceapi.Counter{"compute": {Value: resource.MustParse("7")}}}
		for m := range 8 {
			set.Counters[fmt.Sprintf("memory-%d", m)] = resourceapi.Counter{Value: resource.MustParse("1")}
		}
		slice.Spec.SharedCounters = append(slice.Spec.SharedCounters, set)
	}
	w.slices = append(w.slices, slice)
	return w.recount("n1"), devices
}

// afterChoices adds two devices of each of so many kinds, and to the last claim before all else a request for half as many of any
// kind, and after all else one for one of each kind: thousands of ways to find out at the same place that what was asked for is
// impossible.
func (w *world) afterChoices(kinds int) *world {
	slice := &w.slices[0].Spec
	for i := range 2 * kinds {
		device := numbered(1, map[string]func(int) int{"kind": func(int) int { return 100 + i/2 }})[0]
		device.Name = fmt.Sprintf("choice-%d", i)
		slice.Devices = append(slice.Devices, device)
	}
	devices := &w.claims[len(w.claims)-1].Spec.Devices
	devices.Requests = append([]resourceapi.DeviceRequest{exactly("any", int64(kinds/2), `device.attributes["a.example.com"].kind >= 100`)}, devices.Requests...)
	for i := range kinds {
		devices.Requests = append(devices.Requests, exactly(fmt.Sprintf("kind-%d", i), 1, kind(100+i)))
	}
	return w
}

// hardChoicesAndRoot wants partitions of one root, which has no room for them. That shows after the choice of something else.
// More can be asked for.
func hardChoicesAndRoot(kinds int, more ...resourceapi.DeviceRequest) *world {
	w, _ := migWorld(8)
	shared := numbered(1, map[string]func(int) int{"kind": func(int) int { return 6 }})
	shareable("memory", "100")(0, &shared[0])
	w.slices[0].Spec.Devices = append(w.slices[0].Spec.Devices, shared...)
	requests := append([]resourceapi.DeviceRequest{exactly("a", 2, kind(2)), exactly("b", 2, kind(3)), exactly("c", 1, kind(5))}, more...)
	return w.claim("c", requests...).match("root", "a", "b", "c").afterChoices(kinds)
}

func hardRootLast() *world {
	w := hardChoicesAndRoot(16)
	devices := &w.claims[0].Spec.Devices
	devices.Requests = slices.Concat(devices.Requests[:1], devices.Requests[4:], devices.Requests[1:4])
	return w
}

// onEach wants one device of each value of the attribute.
func onEach(attribute, selector string, values ...int) (requests []resourceapi.DeviceRequest) {
	for _, value := range values {
		requests = append(requests, exactly(fmt.Sprintf("%s-%d", attribute, value), 1, selector, fmt.Sprintf(`device.attributes["a.example.com"].%s == %d`, attribute, value)))
	}
	return requests
}
