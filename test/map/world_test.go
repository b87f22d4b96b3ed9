// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package maptest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
)

// cluster is the API server of all tests. Nothing schedules in it: tests write allocations as a scheduler does.
var cluster *localcluster.Cluster

func TestMain(m *testing.M) {
	os.Exit(localcluster.RunTests(m, localcluster.Options{WithoutControllerManager: true}, func(c *localcluster.Cluster) { cluster = c }))
}

const (
	driver = "gpu.example.com"
	model  = "Example GPU 80GB"
)

// world is what a test has in the cluster: nodes with GPUs, some of which have partitions and some of which can be shared.
type world struct {
	t         *testing.T
	ctx       context.Context
	client    kubernetes.Interface
	namespace string
	made      int
	slices    []*resourceapi.ResourceSlice
	claims    []*resourceapi.ResourceClaim
	pods      []*v1.Pod
	rules     []string
}

func newWorld(t *testing.T, name string, nodes, gpus int) *world {
	t.Helper()
	w := &world{t: t, ctx: t.Context(), client: cluster.AdminClient(), namespace: name}
	_, err := w.client.CoreV1().Namespaces().Create(w.ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	w.must(err)
	_, err = w.client.CoreV1().ServiceAccounts(name).Create(w.ctx, &v1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	w.must(err)
	for i := range nodes {
		node := fmt.Sprintf("%s-%d", name, i)
		slice := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: node},
			Spec:       resourceapi.ResourceSliceSpec{Driver: driver, NodeName: &node, Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1}},
		}
		for g := range gpus {
			slice.Spec.Devices = append(slice.Spec.Devices, device(i, g)...)
		}
		made, err := w.client.ResourceV1().ResourceSlices().Create(w.ctx, slice, metav1.CreateOptions{})
		w.must(err)
		w.slices = append(w.slices, made)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(w.ctx)
		for _, slice := range w.slices {
			w.must(w.client.ResourceV1().ResourceSlices().Delete(ctx, slice.Name, metav1.DeleteOptions{}))
		}
		for _, rule := range w.rules {
			w.must(w.client.ResourceV1().DeviceTaintRules().Delete(ctx, rule, metav1.DeleteOptions{}))
		}
		w.must(w.client.ResourceV1().ResourceClaims(name).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}))
		w.must(w.client.CoreV1().Pods(name).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}, metav1.ListOptions{}))
	})
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// device is a GPU: the third of each node has three partitions, the fourth one can be shared.
func device(node, g int) []resourceapi.Device {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	uuid := fmt.Sprintf("GPU-%d-%d", node, g)
	whole := resourceapi.Device{
		Name: fmt.Sprintf("gpu-%d", g),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"type": text("gpu"), "uuid": text(uuid), "productName": text(model), "nvlinkDomain": text(fmt.Sprintf("link-%d-%d", node, g/2)),
			"resource.kubernetes.io/pciBusID": text(fmt.Sprintf("0000:%02x:00.0", g+1)),
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
	}
	switch g {
	case 2:
		all := []resourceapi.Device{whole}
		for i, profile := range []string{"3g.40gb", "1g.10gb", "1g.10gb"} {
			all = append(all, resourceapi.Device{
				Name: fmt.Sprintf("gpu-%d-mig-%d", g, i),
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					"type": text("mig"), "parentUUID": text(uuid), "profile": text(profile), "productName": text(model),
				},
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("10Gi")}},
			})
		}
		return all
	case 3:
		whole.AllowMultipleAllocations = ptr.To(true)
	}
	return []resourceapi.Device{whole}
}

// claim makes a claim that asks for one GPU.
func (w *world) claim() *resourceapi.ResourceClaim {
	w.t.Helper()
	w.made++
	claim, err := w.client.ResourceV1().ResourceClaims(w.namespace).Create(w.ctx, &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("claim-%d", w.made)},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: driver, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		}}}},
	}, metav1.CreateOptions{})
	w.must(err)
	w.claims = append(w.claims, claim)
	return claim
}

// allocate writes an allocation, and that a pod uses it.
func (w *world) allocate(claim *resourceapi.ResourceClaim, node int, devices ...string) {
	w.t.Helper()
	allocation := &resourceapi.AllocationResult{}
	for _, name := range devices {
		result := resourceapi.DeviceRequestAllocationResult{Request: "gpu", Driver: driver, Pool: w.slices[node].Name, Device: name}
		if name == "gpu-3" {
			w.made++
			result.ShareID = ptr.To(types.UID(fmt.Sprintf("00000000-0000-0000-0000-%012d", w.made)))
			result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("20Gi")}
		}
		allocation.Devices.Results = append(allocation.Devices.Results, result)
	}
	claim.Status.Allocation = allocation
	claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod-of-" + claim.Name, UID: "1"}}
	w.update(claim)
}

// release takes the allocation away.
func (w *world) release(claim *resourceapi.ResourceClaim) {
	w.t.Helper()
	claim.Status = resourceapi.ResourceClaimStatus{}
	w.update(claim)
}

func (w *world) update(claim *resourceapi.ResourceClaim) {
	w.t.Helper()
	updated, err := w.client.ResourceV1().ResourceClaims(w.namespace).UpdateStatus(w.ctx, claim, metav1.UpdateOptions{})
	w.must(err)
	*claim = *updated
}

// pod makes a pod that waits with a claim.
func (w *world) pod(name string, claim *resourceapi.ResourceClaim) *v1.Pod {
	w.t.Helper()
	pod, err := w.client.CoreV1().Pods(w.namespace).Create(w.ctx, &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.PodSpec{
			SchedulerName: "nobody", AutomountServiceAccountToken: ptr.To(false),
			ResourceClaims: []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &claim.Name}},
			Containers:     []v1.Container{{Name: "main", Image: "example.com/main", Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "gpu"}}}}},
		},
	}, metav1.CreateOptions{})
	w.must(err)
	w.pods = append(w.pods, pod)
	return pod
}

// change makes one random change, and tells what it was.
func (w *world) change(random *rand.Rand) string {
	w.t.Helper()
	node := random.IntN(len(w.slices))
	switch random.IntN(10) {
	case 0, 1, 2: // somebody gets something
		devices := [][]string{{"gpu-0"}, {"gpu-1"}, {"gpu-0", "gpu-1"}, {"gpu-2"}, {"gpu-2-mig-0"}, {"gpu-2-mig-1", "gpu-2-mig-2"}, {"gpu-3"}, {"gpu-9"}}
		chosen := devices[random.IntN(len(devices))]
		claim := w.claim()
		w.allocate(claim, node, chosen...)
		return fmt.Sprintf("%s gets %v of %s", claim.Name, chosen, w.slices[node].Name)
	case 3, 4: // and gives it back
		if len(w.claims) == 0 {
			return w.change(random)
		}
		i := random.IntN(len(w.claims))
		claim := w.claims[i]
		w.claims = slices.Delete(w.claims, i, i+1)
		if random.IntN(2) == 0 {
			w.release(claim)
			return claim.Name + " is released"
		}
		w.must(w.client.ResourceV1().ResourceClaims(w.namespace).Delete(w.ctx, claim.Name, metav1.DeleteOptions{}))
		return claim.Name + " is deleted"
	case 5: // a driver taints, or takes it back
		slice := w.slices[node]
		d := &slice.Spec.Devices[random.IntN(len(slice.Spec.Devices))]
		if len(d.Taints) > 0 {
			d.Taints = nil
		} else {
			d.Taints = []resourceapi.DeviceTaint{{Key: "example.com/xid", Value: "79", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		}
		w.publish(node)
		return "a taint of " + slice.Name + "/" + d.Name
	case 6: // a GPU goes or comes
		slice := w.slices[node]
		if random.IntN(2) == 0 && len(slice.Spec.Devices) > 3 {
			slice.Spec.Devices = slice.Spec.Devices[1:]
		} else {
			slice.Spec.Devices = nil
			for g := range 4 {
				slice.Spec.Devices = append(slice.Spec.Devices, device(node, g)...)
			}
		}
		slice.Spec.Pool.Generation++
		w.publish(node)
		return "the devices of " + slice.Name
	case 7: // an administrator taints
		if len(w.rules) > 0 {
			rule := w.rules[0]
			w.rules = w.rules[1:]
			w.must(w.client.ResourceV1().DeviceTaintRules().Delete(w.ctx, rule, metav1.DeleteOptions{}))
			return rule + " is deleted"
		}
		w.made++
		rule := &resourceapi.DeviceTaintRule{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", w.namespace, w.made)},
			Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: &w.slices[node].Name},
				Taint:          resourceapi.DeviceTaint{Key: "example.com/maintenance", Effect: resourceapi.DeviceTaintEffectNoSchedule},
			},
		}
		_, err := w.client.ResourceV1().DeviceTaintRules().Create(w.ctx, rule, metav1.CreateOptions{})
		w.must(err)
		w.rules = append(w.rules, rule.Name)
		return rule.Name + " is made"
	case 8: // a pod comes
		w.made++
		pod := w.pod(fmt.Sprintf("pod-%d", w.made), w.claim())
		return pod.Name + " comes"
	default: // and goes
		if len(w.pods) == 0 {
			return w.change(random)
		}
		i := random.IntN(len(w.pods))
		pod := w.pods[i]
		w.pods = slices.Delete(w.pods, i, i+1)
		w.must(w.client.CoreV1().Pods(w.namespace).Delete(w.ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}))
		return pod.Name + " goes"
	}
}

func (w *world) publish(node int) {
	w.t.Helper()
	updated, err := w.client.ResourceV1().ResourceSlices().Update(w.ctx, w.slices[node], metav1.UpdateOptions{})
	w.must(err)
	w.slices[node] = updated
}

// gpus is what "kubectl stowage gpus -o json" prints, as lines: of each GPU what the page has to show of it.
func gpus(t *testing.T, args ...string) string {
	t.Helper()
	command := exec.Command(binary, append([]string{"gpus", "-o", "json"}, args...)...)
	out, err := command.Output()
	if err != nil {
		var exit *exec.ExitError
		errors.As(err, &exit)
		t.Fatalf("gpus: %v: %s", err, exit.Stderr)
	}
	var list struct{ Items []gpu }
	if err := json.Unmarshal(out, &list); err != nil {
		t.Fatal(err)
	}
	var lines []string
	for i := range list.Items {
		lines = append(lines, list.Items[i].line())
	}
	return strings.Join(lines, "\n")
}

// gpu is the output of gpus as its manual has it.
type gpu struct {
	Node, Device, Model, State string
	MemoryBytes                int64
	Holders                    []struct {
		Namespace, Claim, Profile string
		Pods                      []string
		Share                     map[string]string
	}
	Taints []struct{ Key, Value, Effect, Partition string }
	Place  struct{ NVLinkDomain string }
}

// line is "node: state, what a screen reader says, how many parts are drawn".
func (g *gpu) line() string {
	said := []string{g.Device, g.State}
	if g.Model != "" {
		said = append(said, fmt.Sprintf("%s %dGi", g.Model, g.MemoryBytes>>30))
	}
	var holders, taints []string
	for _, h := range g.Holders {
		who := "claim " + h.Namespace + "/" + h.Claim
		if len(h.Pods) > 0 {
			who = h.Namespace + "/" + strings.Join(h.Pods, ",")
		}
		if part := h.Profile + h.Share["memory"]; part != "" {
			who += " (" + part + ")"
		}
		holders = append(holders, who)
	}
	if len(holders) > 0 {
		said = append(said, "held by "+strings.Join(holders, " and "))
	}
	for _, taint := range g.Taints {
		key := taint.Key
		if taint.Value != "" {
			key += "=" + taint.Value
		}
		key += ":" + taint.Effect
		if taint.Partition != "" {
			key += " on " + taint.Partition
		}
		taints = append(taints, key)
	}
	if len(taints) > 0 {
		said = append(said, "taints "+strings.Join(taints, " and "))
	}
	if g.Place.NVLinkDomain != "" {
		said = append(said, "NVLink group "+g.Place.NVLinkDomain)
	}
	parts := 0
	if g.State == "shared" || g.State == "partitioned" {
		parts = len(g.Holders)
	}
	return fmt.Sprintf("%s: %s, %s, %d parts", g.Node, g.State, strings.Join(said, ", "), parts)
}

// shown is JavaScript for the same lines as the page shows them.
const shown = `[...document.querySelectorAll('.card')]
	.sort((a, b) => Number(a.dataset.card) - Number(b.dataset.card))
	.flatMap((card) => [...card.querySelectorAll('.gpu')].map((cell) => {
		const state = ['free', 'held', 'shared', 'partitioned', 'tainted', 'incomplete', 'gone'].filter((s) => cell.classList.contains(s)).join('+');
		return card.dataset.node + ': ' + state + ', ' + cell.getAttribute('aria-label') + ', ' +
			cell.querySelectorAll('.part:not(.rest)').length + ' parts';
	})).join('\n')`
