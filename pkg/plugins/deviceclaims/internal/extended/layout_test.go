// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package extended

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	resourcehelper "k8s.io/component-helpers/resource"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/twopaths"
	"stowage.dev/stowage/pkg/usage"
)

const gpus, nics = v1.ResourceName("example.com/gpu"), v1.ResourceName("example.com/nic")

// laidOut has containers given as "name=gpus", or "name=gpus/nics"; init containers begin with "i", sidecars
// with "s", app containers with "a".
func laidOut(containers ...string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "p", UID: "p-uid"}}
	for _, container := range containers {
		name, counts, _ := strings.Cut(container, "=")
		wantsGPUs, wantsNICs, _ := strings.Cut(counts, "/")
		c := v1.Container{Name: name, Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("1")}}}
		if wantsGPUs != "" {
			c.Resources.Requests[gpus] = resource.MustParse(wantsGPUs)
		}
		if wantsNICs != "" {
			c.Resources.Requests[nics] = resource.MustParse(wantsNICs)
		}
		switch name[0] {
		case 'i':
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		case 's':
			c.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		default:
			p.Spec.Containers = append(p.Spec.Containers, c)
		}
	}
	return p
}

// described is the layout as "request=count: containers".
func described(l layout) []string {
	var lines []string
	for _, request := range l.requests {
		line := fmt.Sprintf("%s=%d %s:", request.Name, request.Exactly.Count, request.Exactly.DeviceClassName)
		for _, mapping := range l.mappings {
			if mapping.RequestName == request.Name {
				line += " " + mapping.ContainerName
			}
		}
		lines = append(lines, line)
	}
	return lines
}

// Which containers share devices, and which keep theirs.
func TestLayout(t *testing.T) {
	tests := map[string]struct {
		containers []string
		backings   []backing // gpus by gpu if nil
		want       []string
	}{
		"one container": {containers: []string{"a=2"}, want: []string{"container-0-request-1=2 gpu: a"}},
		"app containers keep their own": {
			containers: []string{"a=2", "b=3"},
			want:       []string{"container-0-request-1=2 gpu: a", "container-1-request-1=3 gpu: b"},
		},
		"an init container uses the devices of the app container": {
			containers: []string{"i=4", "a=4"},
			want:       []string{"container-1-request-1=4 gpu: i a"},
		},
		"an init container that needs fewer sees as many as it asked for": {
			containers: []string{"i=1", "a=4"},
			want:       []string{"container-1-request-1=1 gpu: i a", "container-1-request-1-part-1=3 gpu: a"},
		},
		"an init container that needs more": {
			containers: []string{"i=4", "a=2"},
			want:       []string{"container-1-request-1=2 gpu: i a", "container-0-request-1=2 gpu: i"},
		},
		"an init container alone": {containers: []string{"i=3", "a="}, want: []string{"container-0-request-1=3 gpu: i"}},
		"init containers share among each other": {
			containers: []string{"i1=3", "i2=3", "a="},
			want:       []string{"container-1-request-1=3 gpu: i1 i2"},
		},
		"an init container over two app containers": {
			containers: []string{"i=3", "a=2", "b=2"},
			want: []string{
				"container-1-request-1=2 gpu: i a", "container-2-request-1=1 gpu: i b", "container-2-request-1-part-1=1 gpu: b",
			},
		},
		"a sidecar and an app container keep their own": {
			containers: []string{"s=2", "a=2"},
			want:       []string{"container-1-request-1=2 gpu: a", "container-0-request-1=2 gpu: s"},
		},
		"an init container before a sidecar uses the sidecar's": {
			containers: []string{"i=4", "s=2", "a=2"},
			want:       []string{"container-2-request-1=2 gpu: i a", "container-1-request-1=2 gpu: i s"},
		},
		"an init container after a sidecar does not": {
			containers: []string{"s=2", "i=4", "a=2"},
			want:       []string{"container-2-request-1=2 gpu: i a", "container-0-request-1=2 gpu: s", "container-1-request-1=2 gpu: i"},
		},
		"several resources": {
			containers: []string{"i=2/1", "a=2/1", "b=/1"},
			backings:   []backing{{gpus, "gpu"}, {nics, "nic"}},
			want: []string{
				"container-1-request-1=2 gpu: i a",
				"container-1-request-2=1 nic: i a", "container-2-request-1=1 nic: b",
			},
		},
		"only what claims provide": {
			containers: []string{"a=2/1"},
			backings:   []backing{{nics, "nic"}},
			want:       []string{"container-0-request-2=1 nic: a"},
		},
		"zero is nothing": {containers: []string{"i=0", "a=0"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.backings == nil {
				tc.backings = []backing{{gpus, "gpu"}}
			}
			if diff := cmp.Diff(tc.want, described(layOut(laidOut(tc.containers...), tc.backings))); diff != "" {
				t.Errorf("layout (-want +got):\n%s", diff)
			}
		})
	}
}

// For any pod: every container gets as many devices as it asks for; two that may run at the same time, or that must
// keep theirs, share none; and the pod holds exactly what the scheduler counts for a device plugin.
func TestLayoutOfAnyPod(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 20000 {
		var containers []string
		for i := range random.IntN(5) {
			containers = append(containers, fmt.Sprintf("%c%d=%d", "is"[random.IntN(2)], i, random.IntN(6)))
		}
		for i := range 1 + random.IntN(4) {
			containers = append(containers, fmt.Sprintf("a%d=%d", i, random.IntN(6)))
		}
		p := laidOut(containers...)
		if problem := judgeLayout(p, layOut(p, []backing{{gpus, "gpu"}})); problem != "" {
			t.Fatalf("%v: %s", containers, problem)
		}
	}
}

func judgeLayout(p *v1.Pod, l layout) string {
	counts := map[string]int64{}
	for _, request := range l.requests {
		if counts[request.Name] != 0 || request.Exactly.Count <= 0 || len(validation.IsDNS1123Label(request.Name)) > 0 {
			return fmt.Sprintf("bad request %s=%d", request.Name, request.Exactly.Count)
		}
		counts[request.Name] = request.Exactly.Count
	}
	users := map[string]sets.Set[string]{}
	got := map[string]int64{}
	for _, m := range l.mappings {
		if users[m.ContainerName] == nil {
			users[m.ContainerName] = sets.New[string]()
		}
		if users[m.ContainerName].Has(m.RequestName) {
			return fmt.Sprintf("%s has %s twice", m.ContainerName, m.RequestName)
		}
		users[m.ContainerName].Insert(m.RequestName)
		got[m.ContainerName] += counts[m.RequestName]
	}
	total := resourcehelper.PodRequests(p, resourcehelper.PodResourcesOptions{})[gpus]
	if l.devices() != total.Value() {
		return fmt.Sprintf("holds %d devices, a device plugin would hold %d", l.devices(), total.Value())
	}
	all := slices.Concat(p.Spec.InitContainers, p.Spec.Containers)
	for i := range all {
		if want := quantityOf(&all[i], gpus); got[all[i].Name] != want {
			return fmt.Sprintf("%s gets %d devices, want %d", all[i].Name, got[all[i].Name], want)
		}
		for j := range all[:i] {
			// The earlier one has ended by then unless it is a sidecar or an app container.
			keeps := podutil.IsRestartableInitContainer(&all[j]) || j >= len(p.Spec.InitContainers)
			if both := users[all[i].Name].Intersection(users[all[j].Name]); keeps && both.Len() > 0 {
				return fmt.Sprintf("%s and %s share %v", all[j].Name, all[i].Name, both)
			}
		}
	}
	return ""
}

// Numbers that no node has are not cut to something that one has.
func TestLayoutOfAbsurdNumbers(t *testing.T) {
	const most, lowerBitsAreOne = "9223372036854775807", "18446744073709551617"
	for _, containers := range [][]string{{"i=" + most, "a=" + most, "b=" + most}, {"a=" + lowerBitsAreOne}, {"a=1e19"}, {"a=1e2147483647"}} {
		l := layOut(laidOut(containers...), []backing{{gpus, "gpu"}})
		if n := l.devices(); n <= resourceapi.AllocationResultsMaxSize {
			t.Errorf("%q: %d devices", containers, n)
		}
	}
}

// made is who knows of no claim that was made.
type made struct{}

func (made) OwnedBy(string, types.UID) []*resourceapi.ResourceClaim { return nil }
func (made) InFlightFor(types.UID) []usage.ClaimRef                 { return nil }
func (made) Move(types.UID, *resourceapi.ResourceClaim) error       { return nil }

// A pod that asks for more than 64 bits have, because each of its containers asks for all that they have, takes nothing from what others hold: then
// claims would get devices that those have.
func TestAPodThatAsksForAbsurdNumbersHidesNoOther(t *testing.T) {
	const resourceName = v1.ResourceName("nvidia.com/gpu")
	pod := func(name string, counts ...string) *v1.Pod {
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: types.UID(name)}}
		for _, count := range counts {
			p.Spec.Containers = append(p.Spec.Containers, v1.Container{Resources: v1.ResourceRequirements{
				Requests: v1.ResourceList{resourceName: resource.MustParse(count)},
			}})
		}
		return p
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n0"}, Status: v1.NodeStatus{
		Allocatable: v1.ResourceList{resourceName: resource.MustParse("2")}, Capacity: v1.ResourceList{resourceName: resource.MustParse("2")},
	}}
	store := inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()})
	spec := resourceapi.ResourceSliceSpec{
		Driver: "gpu.nvidia.com", NodeName: &node.Name, Pool: resourceapi.ResourcePool{Name: "n0", ResourceSliceCount: 1},
		Devices: []resourceapi.Device{{Name: "gpu-0"}, {Name: "gpu-1"}},
	}
	twopaths.Mark(spec.Devices, 0)
	store.SetSlice(&resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: spec})
	const most = "9223372036854775807"
	for name, pods := range map[string][]*v1.Pod{
		"one pod that has two":                                {pod("a", "2")},
		"beside it one whose sum has the lower 64 bits of -2": {pod("a", "2"), pod("evil", most, most)},
	} {
		t.Run(name, func(t *testing.T) {
			info := framework.NewNodeInfo(pods...)
			info.SetNode(node)
			held := (&Resources{Claims: made{}}).HeldUnseen(store.View(), info)
			if held == nil || len(held.Devices.Results) != 2 {
				t.Errorf("held: %v, want both devices", held)
			}
		})
	}
}

// The name leaves room for what the API server wants of names, however long the pod's is.
func TestExtendedClaimPrefix(t *testing.T) {
	for pod, want := range map[string]string{
		"p":                                "p-extended-resources-",
		strings.Repeat("a", 37) + "-b":     strings.Repeat("a", 37) + "-extended-resources-",
		strings.Repeat("a", 253):           strings.Repeat("a", 38) + "-extended-resources-",
		strings.Repeat("a", 36) + ".b.ccc": strings.Repeat("a", 36) + ".b-extended-resources-",
	} {
		if got := namePrefix(pod); got != want {
			t.Errorf("prefix %q, want %q", got, want)
		}
	}
}
