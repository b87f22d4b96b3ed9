// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Of eight alternatives the last is as good as any if there is no other.
func TestEightAlternatives(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(a100, 2)...)
	startScheduler(t, w.name, schedulerSetup{})
	request := resourceapi.DeviceRequest{Name: "gpu"}
	for i := range resourceapi.FirstAvailableDeviceRequestMaxSize {
		// The first six are of products that nobody has, the seventh wants more than there are.
		alternative := resourceapi.DeviceSubRequest{
			Name: fmt.Sprintf("choice-%d", i), DeviceClassName: w.class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			Selectors: w.selectors(byProduct(product{name: fmt.Sprintf("Product %d", i)})),
		}
		if i >= 6 {
			alternative.Selectors, alternative.Count = w.selectors(byProduct(a100)), int64(9-i)
		}
		request.FirstAvailable = append(request.FirstAvailable, alternative)
	}
	w.addClaim("wanted", spec(request))
	w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "a")
	want := []result{{Request: "gpu/choice-7", Device: "gpu-0"}, {Request: "gpu/choice-7", Device: "gpu-1"}}
	if diff := cmp.Diff(want, results(w.claim("wanted"))); diff != "" {
		t.Errorf("allocated devices (-want +got):\n%s", diff)
	}

	// A pod for which there is nothing left is told first about those that match something.
	w.addClaim("late", spec(request))
	w.addPod("late", withClaim("late"))
	w.awaitUnschedulable("late", `"gpu/choice-6"`, `"gpu/choice-7"`, "2 of 2", "held", "(and 5 more alternatives)", "if claim "+w.name+"/wanted were released")
}

// distinctAttribute: devices that have nothing of the kind in common.
func TestDistinctAttribute(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(a100, 4)...) // two NUMA nodes, two GPUs each
	startScheduler(t, w.name, schedulerSetup{})
	apart := func(n int64) resourceapi.ResourceClaimSpec {
		s := spec(w.exactly("gpus", n))
		s.Devices.Constraints = []resourceapi.DeviceConstraint{{
			DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName("resource.kubernetes.io/numaNode")),
		}}
		return s
	}
	w.addClaim("two", apart(2))
	w.addPod("two", withClaim("two"))
	w.awaitBoundTo("two", "a")
	if diff := cmp.Diff([]string{"gpu-0", "gpu-2"}, devices(w.claim("two"))); diff != "" {
		t.Errorf("allocated devices (-want +got):\n%s", diff)
	}
	w.addClaim("three", apart(3))
	w.addPod("three", withClaim("three"))
	w.awaitUnschedulable("three", "gpus")
}

// Configuration reaches the claim in the order in which the driver applies it: that of the classes first, in the
// order of the requests, then the claim's own, each with the requests that it is for.
func TestConfigurationOfClassesAndClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 3)...)
	startScheduler(t, w.name, schedulerSetup{})
	for _, name := range []string{"fast", "safe"} {
		class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: w.name + "-" + name}}
		class.Spec.Selectors = w.selectors(`device.driver == "$DRIVER"`)
		for i := range 2 {
			class.Spec.Config = append(class.Spec.Config, resourceapi.DeviceClassConfiguration{
				DeviceConfiguration: opaque(w.driver, fmt.Sprintf(`{"class":"%s-%d"}`, name, i)),
			})
		}
		_, err := w.client.ResourceV1().DeviceClasses().Create(w.ctx, class, metav1.CreateOptions{})
		w.must(err, "creating class %s", class.Name)
		t.Cleanup(func() { w.cleanUp(w.client.ResourceV1().DeviceClasses().Delete, class.Name) })
	}
	request := func(name, class string) resourceapi.DeviceRequest {
		r := w.exactly(name, 1)
		r.Exactly.DeviceClassName = w.name + "-" + class
		return r
	}
	claim := spec(request("one", "safe"), request("two", "fast"), request("three", "safe"))
	own := func(what string, requests ...string) resourceapi.DeviceClaimConfiguration {
		return resourceapi.DeviceClaimConfiguration{Requests: requests, DeviceConfiguration: opaque(w.driver, fmt.Sprintf(`{"claim":%q}`, what))}
	}
	claim.Devices.Config = []resourceapi.DeviceClaimConfiguration{own("for one", "one"), own("for all"), own("for two and three", "two", "three")}
	w.addClaim("wanted", claim)
	w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "a")

	var got []string
	for _, c := range w.claim("wanted").Status.Allocation.Devices.Config {
		got = append(got, fmt.Sprintf("%s %s %s", c.Source, c.Requests, c.Opaque.Parameters.Raw))
	}
	want := []string{
		`FromClass [one three] {"class":"safe-0"}`,
		`FromClass [one three] {"class":"safe-1"}`,
		`FromClass [two] {"class":"fast-0"}`,
		`FromClass [two] {"class":"fast-1"}`,
		`FromClaim [one] {"claim":"for one"}`,
		`FromClaim [] {"claim":"for all"}`,
		`FromClaim [two three] {"claim":"for two and three"}`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("configuration (-want +got):\n%s", diff)
	}
}

// A pod that waits says what is missing and whose release would help; when that happens it runs.
func TestWaitingPodNamesTheHoldersInItsWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 4)...)
	w.addNode("b", gpus(a100, 4)...)
	startScheduler(t, w.name, schedulerSetup{})
	hold := func(name, node string, n int64) {
		t.Helper()
		w.addClaim(name, spec(w.exactly("gpu", n)))
		w.addPod(name, withClaim(name), w.onNode(node))
		w.awaitBoundTo(name, node)
	}
	hold("one", "a", 1)
	hold("three", "a", 3)
	hold("other", "b", 1)

	w.addClaim("train", spec(w.exactly("gpu", 2, byProduct(h100))))
	w.addPod("train", withClaim("train"))
	pod := w.awaitUnschedulable("train",
		`request "gpu" of claim train: 4 of 8 `+w.class+` devices held, 4 filtered by selector`,
		"would fit on node "+w.nodeName("a")+" if claim "+w.name+"/three were released")
	w.awaitEvent(pod, "if claim "+w.name+"/three were released")
	w.deletePod("three")
	w.awaitBoundTo("train", "a")
}
