// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package extended

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// backing is an extended resource that claims provide on some node, and the class that stands for it.
type backing struct {
	resource v1.ResourceName
	class    string
}

// layout is how the devices of a pod's claim for extended resources are cut into requests, and which containers
// get which of them.
type layout struct {
	requests []resourceapi.DeviceRequest
	mappings []v1.ContainerExtendedResourceRequest
}

// layOut cuts the devices that a pod needs for some extended resources into as few requests as give every
// container exactly the number that it asks for. It holds no device more than the kubelet's device manager would
// (pkg/kubelet/cm/devicemanager):
//
//   - An init container that ends before others start leaves its devices to those: to all app containers, all later
//     init containers, and all later sidecars (restartable init containers).
//   - A sidecar and an app container keep theirs.
//
// So a pod whose init container asks for 4 and whose app container asks for 4 holds 4. One in which they ask for
// 2 and 4 holds 4 as well, in two requests of 2, of which the init container has one.
//
// Overhead of a runtime class is not for any container, so no device is held for it.
func layOut(pod *v1.Pod, backings []backing) layout {
	var out layout
	for _, b := range backings {
		line := newDeviceLine(pod, b.resource)
		line.cut(b, &out)
	}
	return out
}

// devices returns how many devices the requests ask for.
func (l *layout) devices() int64 {
	var n int64
	for i := range l.requests {
		n += l.requests[i].Exactly.Count
	}
	return n
}

// deviceLine has all devices that a pod needs for one extended resource in one line:
//
//	| app containers in order | sidecars, the last one first | more, for init containers |
//
// What an init container may use of the others' devices is then always the beginning of the line: all of the app
// containers and the sidecars that start later. What it needs beyond that comes from the end part, which all init
// containers share.
type deviceLine struct {
	containers []lineContainer
	// kept is how long the line is without its end part.
	kept int64
}

// lineContainer is one container, with the parts of the line that it gets.
type lineContainer struct {
	name string
	// index is the position among all init and app containers, and position that of the resource among the
	// container's requests.
	index, position int
	// parts are one interval, or two for an init container that needs more than the others keep.
	parts []interval
}

// interval is from begin up to, but not including, end.
type interval struct{ begin, end int64 }

func newDeviceLine(pod *v1.Pod, resource v1.ResourceName) *deviceLine {
	line := &deviceLine{}
	inits := len(pod.Spec.InitContainers)
	wanted := make([]int64, 0, inits+len(pod.Spec.Containers))
	for _, containers := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			line.containers = append(line.containers, lineContainer{
				name: containers[i].Name, index: len(line.containers), position: positionOf(&containers[i], resource),
			})
			wanted = append(wanted, quantityOf(&containers[i], resource))
		}
	}
	keep := func(i int) {
		if wanted[i] > 0 {
			line.containers[i].parts = []interval{{line.kept, line.kept + wanted[i]}}
			line.kept += wanted[i]
		}
	}
	for i := inits; i < len(wanted); i++ {
		keep(i)
	}
	// From the last to the first, so that line.kept is what the containers after each one keep.
	usable := make([]int64, inits)
	for i := inits - 1; i >= 0; i-- {
		if podutil.IsRestartableInitContainer(&pod.Spec.InitContainers[i]) {
			keep(i)
			continue
		}
		usable[i] = line.kept
	}
	for i := range inits {
		if wanted[i] == 0 || podutil.IsRestartableInitContainer(&pod.Spec.InitContainers[i]) {
			continue
		}
		shared := min(wanted[i], usable[i])
		if shared > 0 {
			line.containers[i].parts = append(line.containers[i].parts, interval{0, shared})
		}
		if more := wanted[i] - shared; more > 0 {
			line.containers[i].parts = append(line.containers[i].parts, interval{line.kept, line.kept + more})
		}
	}
	return line
}

// cut makes a request of every piece of the line that no container has only in part.
func (l *deviceLine) cut(b backing, out *layout) {
	var cuts []int64
	for i := range l.containers {
		for _, part := range l.containers[i].parts {
			cuts = append(cuts, part.begin, part.end)
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)

	pieces := map[int]int{} // requests so far, by the container that they are named after
	for k := 0; k+1 < len(cuts); k++ {
		piece := interval{cuts[k], cuts[k+1]}
		var users []*lineContainer
		for i := range l.containers {
			if l.containers[i].has(piece) {
				users = append(users, &l.containers[i])
			}
		}
		// Named after the container that keeps the devices, which comes last.
		home := slices.MaxFunc(users, func(a, b *lineContainer) int { return cmp.Compare(a.index, b.index) })
		name := fmt.Sprintf("container-%d-request-%d", home.index, home.position)
		if n := pieces[home.index]; n > 0 {
			name += fmt.Sprintf("-part-%d", n)
		}
		pieces[home.index]++
		out.requests = append(out.requests, resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: b.class,
			AllocationMode:  resourceapi.DeviceAllocationModeExactCount,
			Count:           piece.end - piece.begin,
		}})
		for _, user := range users {
			out.mappings = append(out.mappings, v1.ContainerExtendedResourceRequest{
				ContainerName: user.name, ResourceName: string(b.resource), RequestName: name,
			})
		}
	}
}

// has tells whether a piece, which no part ends within, belongs to the container.
func (c *lineContainer) has(piece interval) bool {
	return slices.ContainsFunc(c.parts, func(part interval) bool {
		return part.begin <= piece.begin && piece.end <= part.end
	})
}

// quantityOf returns how many devices a container asks for. The API has made sure that it is a whole number, and
// that request and limit are equal. Sums of numbers beyond all use must not overflow.
func quantityOf(c *v1.Container, resource v1.ResourceName) int64 {
	return min(amount.Int64(c.Resources.Requests[resource]), math.MaxInt32)
}

// positionOf returns the position of a resource among all that a container requests, by name.
func positionOf(c *v1.Container, resource v1.ResourceName) int {
	position := 0
	for name := range c.Resources.Requests {
		if name < resource {
			position++
		}
	}
	return position
}
