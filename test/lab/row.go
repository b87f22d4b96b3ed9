// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// DriverName is the DRA driver whose devices are GPUs.
const DriverName = "gpu.nvidia.com"

// Row is one running pod: what the scheduler allocated, and what its container
// says that it got.
type Row struct {
	Pod, Node string
	// Claims are the names of the pod's claims.
	Claims []string
	// Allocated are the names of the devices, in the order of the claims'
	// results.
	Allocated []string
	// Seen is what the container saw, for people.
	Seen string
	// Err says how it differs from what was allocated; nil if it does not.
	Err error
}

// Sight is what a container was given, from its own view where there is a
// container.
type Sight struct {
	// VisibleDevices are the GPU UUIDs of NVIDIA_VISIBLE_DEVICES.
	VisibleDevices []string
	// Told are the UUIDs in the device metadata files.
	Told []string
	// Minors are the numbers of the /dev/nvidia<minor> nodes that it can open up
	// to the missing driver.
	Minors []int
	// Problems are nodes that are there and cannot be used as they should.
	Problems []string
	// Hollow is true when no container ran: the edits are those that the CDI
	// library would have made.
	Hollow bool
}

// String is the last column of the demo's table.
func (s Sight) String() string {
	paths := make([]string, 0, len(s.Minors))
	for _, minor := range s.Minors {
		paths = append(paths, fmt.Sprintf("/dev/nvidia%d", minor))
	}
	text := strings.Join(paths, " ") + " NVIDIA_VISIBLE_DEVICES=" + strings.Join(shorten(s.VisibleDevices), ",")
	if s.Hollow {
		return "hollow: " + text
	}
	return text
}

// shorten cuts UUIDs as `docker ps` does, so that a row fits a screen.
func shorten(uuids []string) []string {
	short := make([]string, len(uuids))
	for i, uuid := range uuids {
		short[i] = uuid[:min(len(uuid), len("GPU-")+8)]
	}
	return short
}

// judge compares what a container saw with the devices allocated to its pod.
// The expectation comes from discovery on the node, not from the agent's
// prepare, whose work is on trial.
func judge(allocated []resourceapi.DeviceRequestAllocationResult, found inventory, seen Sight) error {
	var errs []error
	wantUUIDs, wantMinors := map[string]bool{}, map[int]bool{}
	for _, result := range allocated {
		device, ok := found.find(result.Device)
		if !ok {
			errs = append(errs, fmt.Errorf("allocated device %s/%s does not exist on the node", result.Pool, result.Device))
			continue
		}
		wantUUIDs[device.UUID], wantMinors[device.Minor] = true, true
	}
	if len(wantUUIDs) == 0 {
		errs = append(errs, errors.New("no device is allocated"))
	}
	errs = append(errs,
		difference("NVIDIA_VISIBLE_DEVICES", wantUUIDs, seen.VisibleDevices),
		difference("device nodes /dev/nvidia<minor>", wantMinors, seen.Minors))
	if !seen.Hollow { // which mounts nothing
		errs = append(errs, difference("device metadata", wantUUIDs, seen.Told))
	}
	for _, problem := range seen.Problems {
		errs = append(errs, errors.New(problem))
	}
	return errors.Join(errs...)
}

func difference[K cmp.Ordered](what string, want map[K]bool, got []K) error {
	sorted := slices.Sorted(slices.Values(got))
	if expected := slices.Sorted(maps.Keys(want)); !slices.Equal(expected, sorted) {
		return fmt.Errorf("%s: the container has %v, allocated is %v", what, sorted, expected)
	}
	return nil
}

// allocation collects the results of all claims of a pod that its first container
// uses, and checks that each claim is reserved for it. The first container of a pod
// with claims in its spec uses all of those.
func (l *Lab) allocation(ctx context.Context,
	pod *corev1.Pod,
) (claims []string, results []resourceapi.DeviceRequestAllocationResult, err error) {
	for i := range pod.Spec.ResourceClaims {
		name, mustBeOwned, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, nil, err
		}
		if name == nil {
			continue
		}
		claim, err := l.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, *name, metav1.GetOptions{})
		if err != nil {
			return nil, nil, err
		}
		claims = append(claims, claim.Name)
		if mustBeOwned {
			if err := resourceclaim.IsForPod(pod, claim, false); err != nil {
				return nil, nil, err
			}
		}
		if err := inUse(claim, pod); err != nil {
			return nil, nil, err
		}
		results = append(results, claim.Status.Allocation.Devices.Results...)
	}
	extended := pod.Status.ExtendedResourceClaimStatus
	if extended == nil {
		return claims, results, nil
	}
	claim, err := l.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, extended.ResourceClaimName, metav1.GetOptions{})
	if err != nil {
		return nil, nil, err
	}
	claims = append(claims, claim.Name)
	if err := inUse(claim, pod); err != nil {
		return nil, nil, err
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if slices.ContainsFunc(extended.RequestMappings, func(m corev1.ContainerExtendedResourceRequest) bool {
			return m.ContainerName == pod.Spec.Containers[0].Name && m.RequestName == result.Request
		}) {
			results = append(results, result)
		}
	}
	return claims, results, nil
}

// inUse checks that a running pod has what its claim promises.
func inUse(claim *resourceapi.ResourceClaim, pod *corev1.Pod) error {
	if claim.Status.Allocation == nil {
		return fmt.Errorf("claim %s of running pod %s has no allocation", claim.Name, pod.Name)
	}
	if !resourceclaim.IsReservedForPod(pod, claim, false) {
		return fmt.Errorf("claim %s is not reserved for its running pod %s", claim.Name, pod.Name)
	}
	return nil
}

// Row reads back one running pod.
func (l *Lab) Row(ctx context.Context, pod *corev1.Pod) Row {
	return l.Rows(ctx, []*corev1.Pod{pod})[0]
}

// Rows reads back running pods. What their nodes have is asked for once.
func (l *Lab) Rows(ctx context.Context, pods []*corev1.Pod) []Row {
	found := map[string]inventory{}
	rows := make([]Row, 0, len(pods))
	for _, pod := range pods {
		node, ok := l.nodes[pod.Spec.NodeName]
		if !ok {
			rows = append(rows, Row{
				Pod: pod.Name, Node: pod.Spec.NodeName,
				Err: fmt.Errorf("pod %s runs on node %q, which is none of ours", pod.Name, pod.Spec.NodeName),
			})
			continue
		}
		if _, ok := found[node.name]; !ok {
			var err error
			if found[node.name], err = l.discover(ctx, node); err != nil {
				rows = append(rows, Row{Pod: pod.Name, Node: node.name, Err: err})
				continue
			}
		}
		rows = append(rows, l.row(ctx, pod, node, found[node.name]))
	}
	return rows
}

func (l *Lab) row(ctx context.Context, pod *corev1.Pod, node *labNode, found inventory) Row {
	row := Row{Pod: pod.Name, Node: node.name}
	claims, results, err := l.allocation(ctx, pod)
	if err != nil {
		row.Err = err
		return row
	}
	row.Claims = claims
	for _, result := range results {
		row.Allocated = append(row.Allocated, result.Device)
	}
	seen, err := node.sight(ctx, pod)
	if err != nil {
		row.Err = err
		return row
	}
	row.Seen = seen.String()
	row.Err = judge(results, found, seen)
	return row
}

// Doubles lists devices that more than one claim holds, other than in shares.
func Doubles(claims []resourceapi.ResourceClaim) []string {
	holders, shares := map[string][]string{}, map[string]int{}
	for _, claim := range claims {
		if claim.Status.Allocation == nil {
			continue
		}
		for _, result := range claim.Status.Allocation.Devices.Results {
			if result.AdminAccess != nil && *result.AdminAccess {
				continue
			}
			device := result.Driver + "/" + result.Pool + "/" + result.Device
			holders[device] = append(holders[device], claim.Namespace+"/"+claim.Name)
			if result.ShareID != nil {
				shares[device]++
			}
		}
	}
	var doubles []string
	for device, claims := range holders {
		if len(claims) > 1 && len(claims) > shares[device] {
			slices.Sort(claims)
			doubles = append(doubles, fmt.Sprintf("%s is held by %s", device, strings.Join(claims, " and ")))
		}
	}
	slices.Sort(doubles)
	return doubles
}
