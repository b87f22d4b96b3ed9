package allocator

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestExplainSaysInOneLineWhatIsMissing(t *testing.T) {
	h100 := `device.attributes["a.example.com"].index >= 6`
	tests := map[string]struct {
		world *world
		want  string
	}{
		"held, filtered and tainted": {
			world: rig().node("n1", gpus(8, taint("gpu-lost", 7))...).hold("n1/gpu-6").claim("train", exactly("gpu", 1, h100)),
			want:  `request "gpu" of claim train: 1 of 8 gpu.example.com devices held, 6 filtered by selector 'device.attributes["a.example.com"].index >= 6', 1 tainted gpu-lost`,
		},
		"free, but not enough on one node": {
			world: rig().node("n1", gpus(4)...).node("n2", gpus(4)...).hold("n1/gpu-0", "n2/gpu-0").claim("train", exactly("gpu", 4)),
			want:  `request "gpu" of claim train: 2 of 8 gpu.example.com devices held, 6 free (4 wanted on one node)`,
		},
		"no device at all": {
			world: rig().node("n1").claim("train", exactly("gpu", 1)),
			want:  `request "gpu" of claim train: no gpu.example.com devices`,
		},
		"constraint": {
			world: rig().node("n1", gpus(8)...).claim("train", exactly("gpu", 4)).matchAttribute("a.example.com/root"),
			want:  `request "gpu" of claim train: 8 of 8 gpu.example.com devices free (4 wanted on one node); at most 2 free devices of one node share a.example.com/root (claim train wants 4)`,
		},
		"two claims want the same devices": {
			world: rig().node("n1", gpus(3)...).claim("one", exactly("gpu", 2)).claim("two", exactly("gpu", 2)),
			want: `request "gpu" of claim one: 3 of 3 gpu.example.com devices free (2 wanted on one node); ` +
				`request "gpu" of claim two: 3 of 3 gpu.example.com devices free (2 wanted on one node); ` +
				`1 nodes have free devices for each request, but not for all together`,
		},
		"selector fails on a device": {
			world: rig().node("n1", gpus(1, without("index", 0))...).claim("train", exactly("gpu", 1, h100)),
			want: `request "gpu" of claim train: 1 of 1 gpu.example.com devices failing a selector; ` +
				`claim default/train, request "gpu": selector 'device.attributes["a.example.com"].index >= 6' failed on device a.example.com/n1/gpu-0: no such key: index. consider using CEL optional chaining (.? followed by orValue()) or guarding the check with has() for optional fields`,
		},
	}
	var choices resourceapi.DeviceRequest
	choices.Name = "gpu"
	for i, selector := range []string{"index > 90", "index > 80", "index == 1", "index > 70", "index == 2", "index > 60"} {
		sub := exactly("", 1, `device.attributes["a.example.com"].`+selector).Exactly
		choices.FirstAvailable = append(choices.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: fmt.Sprintf("choice-%d", i), DeviceClassName: sub.DeviceClassName, AllocationMode: sub.AllocationMode, Count: 1, Selectors: sub.Selectors,
		})
	}
	tests["of many alternatives those that match something"] = struct {
		world *world
		want  string
	}{
		world: rig().node("n1", gpus(3)...).hold("n1/gpu-1", "n1/gpu-2").claim("train", choices, exactly("other", 4)),
		want: `request "gpu/choice-2" of claim train: 1 of 3 gpu.example.com devices held, 2 filtered by selector 'device.attributes["a.example.com"].index == 1'; ` +
			`request "gpu/choice-4" of claim train: 1 of 3 gpu.example.com devices held, 2 filtered by selector 'device.attributes["a.example.com"].index == 2'; ` +
			`request "gpu/choice-0" of claim train: 3 of 3 gpu.example.com devices filtered by selector 'device.attributes["a.example.com"].index > 90' (and 3 more alternatives); ` +
			`request "other" of claim train: 2 of 3 gpu.example.com devices held, 1 free (4 wanted on one node)`,
	}
	cpus := func(i int, d *resourceapi.Device) {
		if i < 2 {
			d.NodeAllocatableResources = map[v1.ResourceName]resourceapi.NodeAllocatableResource{v1.ResourceCPU: {}}
		}
	}
	const standing = `standing for CPU or memory of a node (nodeAllocatableResources), which only kube-scheduler itself can account for`
	tests["devices that stand for CPU"] = struct {
		world *world
		want  string
	}{
		world: rig().node("n1", gpus(3, cpus)...).claim("train", exactly("gpu", 2)),
		want:  `request "gpu" of claim train: 2 of 3 gpu.example.com devices ` + standing + `, 1 free (2 wanted on one node)`,
	}
	tests["all devices, some of which stand for CPU"] = struct {
		world *world
		want  string
	}{
		world: rig().node("n1", gpus(3, cpus)...).claim("train", all("gpu")),
		want:  `request "gpu" of claim train: 2 of 3 gpu.example.com devices ` + standing + `, 1 free (all of a node wanted)`,
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			requests, failures := tc.world.failures(t, context.Background())
			if len(failures) != len(tc.world.nodes) {
				t.Fatalf("%d of %d nodes refused", len(failures), len(tc.world.nodes))
			}
			if diff := cmp.Diff(tc.want, Explain(requests, maps.All(failures)).String()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestExplainIsBoundedAndCountsASharedPoolOnce(t *testing.T) {
	w := rig().node("n1", gpus(2)...)
	w.slices[0].Spec.NodeName, w.slices[0].Spec.AllNodes = nil, ptr.To(true)
	w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n2"}})
	w.claim("train", exactly("gpu", 3))
	requests, failures := w.failures(t, context.Background())
	want := `request "gpu" of claim train: 2 of 2 gpu.example.com devices free (3 wanted on one node)`
	if diff := cmp.Diff(want, Explain(requests, maps.All(failures)).String()); diff != "" {
		t.Error(diff)
	}

	w.claims = nil
	for i := range 20 {
		w.claim(fmt.Sprintf("claim-%d", i), exactly("gpu", 3, strings.Repeat("!", 400)+"false"))
	}
	requests, failures = w.failures(t, context.Background())
	if n := len(Explain(requests, maps.All(failures)).String()); n > maxExplanation {
		t.Errorf("explanation has %d bytes, want at most %d", n, maxExplanation)
	}
}
