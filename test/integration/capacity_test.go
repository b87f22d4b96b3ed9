// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// divisible makes a device that many can share: memory in steps of 5Gi, 10Gi if nothing is said, and one of three
// levels of service.
func divisible(name, memory string) resourceapi.Device {
	return resourceapi.Device{
		Name:                     name,
		AllowMultipleAllocations: ptr.To(true),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"memory": {
				Value: resource.MustParse(memory),
				RequestPolicy: &resourceapi.CapacityRequestPolicy{
					Default: ptr.To(resource.MustParse("10Gi")),
					ValidRange: &resourceapi.CapacityRequestPolicyRange{
						Min: ptr.To(resource.MustParse("5Gi")), Max: ptr.To(resource.MustParse("30Gi")), Step: ptr.To(resource.MustParse("5Gi")),
					},
				},
			},
			"compute": {
				Value: resource.MustParse("100"),
				RequestPolicy: &resourceapi.CapacityRequestPolicy{
					Default:     ptr.To(resource.MustParse("10")),
					ValidValues: []resource.Quantity{resource.MustParse("10"), resource.MustParse("25"), resource.MustParse("50")},
				},
			},
		},
	}
}

// share is a request for a part of a device. Amounts are by capacity name.
func (w *world) share(name string, amounts map[resourceapi.QualifiedName]string) resourceapi.DeviceRequest {
	request := w.exactly(name, 1)
	if amounts != nil {
		request.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
		for capacity, amount := range amounts {
			request.Exactly.Capacity.Requests[capacity] = resource.MustParse(amount)
		}
	}
	return request
}

// shareResult is what matters of a share.
type shareResult struct {
	Device   string
	Consumes map[resourceapi.QualifiedName]string
}

// shares are the shares of a claim. All must have IDs, and none the ID of another one that is known already.
func (w *world) shares(claim *resourceapi.ResourceClaim, known map[string]string) []shareResult {
	w.t.Helper()
	var all []shareResult
	for _, r := range claim.Status.Allocation.Devices.Results {
		s := shareResult{Device: r.Device, Consumes: map[resourceapi.QualifiedName]string{}}
		for name, quantity := range r.ConsumedCapacity {
			s.Consumes[name] = quantity.String()
		}
		all = append(all, s)
		if r.ShareID == nil || *r.ShareID == "" {
			w.t.Errorf("claim %s has a share of %s without ID", claim.Name, r.Device)
			continue
		}
		if other, ok := known[string(*r.ShareID)]; ok {
			w.t.Errorf("claims %s and %s have the share ID %s", claim.Name, other, *r.ShareID)
		}
		known[string(*r.ShareID)] = claim.Name
	}
	return all
}

// Shares of a device take as much as its policies make of the requests, until no more is left.
func TestConsumableCapacity(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", divisible("gpu-0", "40Gi"))
	startScheduler(t, w.name, schedulerSetup{})

	ids := map[string]string{}
	steps := []struct {
		claim string
		asks  map[resourceapi.QualifiedName]string
		takes map[resourceapi.QualifiedName]string
	}{
		{"defaults", nil, map[resourceapi.QualifiedName]string{"memory": "10Gi", "compute": "10"}},
		{"rounded", map[resourceapi.QualifiedName]string{"memory": "12Gi", "compute": "11"}, map[resourceapi.QualifiedName]string{"memory": "15Gi", "compute": "25"}},
		{"least", map[resourceapi.QualifiedName]string{"memory": "1Gi"}, map[resourceapi.QualifiedName]string{"memory": "5Gi", "compute": "10"}},
	}
	for _, step := range steps {
		w.addClaim(step.claim, spec(w.share("gpu", step.asks)))
		w.addPod(step.claim, withClaim(step.claim))
		w.awaitBoundTo(step.claim, "a")
		if diff := cmp.Diff([]shareResult{{"gpu-0", step.takes}}, w.shares(w.claim(step.claim), ids)); diff != "" {
			t.Errorf("shares of %s (-want +got):\n%s", step.claim, diff)
		}
	}

	// 30Gi of 40Gi and 45 of 100 are taken.
	w.addClaim("late", spec(w.share("gpu", map[resourceapi.QualifiedName]string{"memory": "15Gi"})))
	w.addPod("late", withClaim("late"))
	w.awaitUnschedulable("late", "gpu", "would fit on node")
	w.addClaim("small", spec(w.share("gpu", map[resourceapi.QualifiedName]string{"memory": "10Gi", "compute": "50"})))
	w.addPod("small", withClaim("small"))
	w.awaitBound("small")

	w.deletePod("rounded")
	w.awaitBoundTo("late", "a")
	if diff := cmp.Diff([]shareResult{{"gpu-0", map[resourceapi.QualifiedName]string{"memory": "15Gi", "compute": "10"}}}, w.shares(w.claim("late"), ids)); diff != "" {
		t.Errorf("shares of late (-want +got):\n%s", diff)
	}
}

// Steps of a policy that are no whole numbers are counted in thousandths, to the last one of the device, and in whole numbers with the
// gate off.
func testFractionalCapacityRanges(t *testing.T, w *world) {
	w.addNode("n", resourceapi.Device{
		Name: "gpu-0", AllowMultipleAllocations: ptr.To(true),
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"cores": {
			Value: resource.MustParse("2"),
			RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: ptr.To(resource.MustParse("500m")),
				ValidRange: &resourceapi.CapacityRequestPolicyRange{
					Min: ptr.To(resource.MustParse("500m")), Max: ptr.To(resource.MustParse("2")), Step: ptr.To(resource.MustParse("250m")),
				},
			},
		}},
	})
	ids := map[string]string{}
	takes := func(name, asks, want string, options ...podOption) {
		t.Helper()
		w.addClaim(name, spec(w.share("gpu", map[resourceapi.QualifiedName]string{"cores": asks})))
		w.addPod(name, append(options, withClaim(name))...)
		w.awaitBoundTo(name, "n")
		if diff := cmp.Diff([]shareResult{{"gpu-0", map[resourceapi.QualifiedName]string{"cores": want}}}, w.shares(w.claim(name), ids)); diff != "" {
			t.Errorf("shares of %s (-want +got):\n%s", name, diff)
		}
	}
	takes("whole", "600m", "1", withGates(gatesOff))
	w.deletePod("whole")
	w.awaitClaim("whole", "is free", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation == nil })

	takes("rounded", "600m", "750m")
	takes("least", "100m", "500m")
	takes("last", "750m", "750m")
	w.addClaim("late", spec(w.share("gpu", nil)))
	w.addPod("late", withClaim("late"))
	w.awaitUnschedulable("late", "gpu", "would fit on node")
}

// What no policy permits is not given, whatever is left.
func TestRequestOutsideThePolicyOfACapacity(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", divisible("gpu-0", "80Gi"))
	w.addNode("b", divisible("gpu-0", "80Gi"))
	startScheduler(t, w.name, schedulerSetup{})
	for name, asks := range map[string]map[resourceapi.QualifiedName]string{ // by claim
		"more-than-max":    {"memory": "31Gi"},
		"more-than-values": {"compute": "51"},
		"no-such-capacity": {"bandwidth": "1"},
	} {
		w.addClaim(name, spec(w.share("gpu", asks)))
		w.addPod(name, withClaim(name))
		w.awaitUnschedulable(name, `request "gpu" of claim `+name)
	}
}

// A device that allows multiple allocations has no limit but its capacity, and two requests of one pod can have
// shares of it unless the claim says otherwise.
func TestMultiAllocatableDevices(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	open := resourceapi.Device{Name: "open", AllowMultipleAllocations: ptr.To(true), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": text("open")}}
	closed := resourceapi.Device{Name: "closed", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": text("closed")}}
	w.addNode("a", closed, open)
	startScheduler(t, w.name, schedulerSetup{})
	ids := map[string]string{}

	shared := `device.allowMultipleAllocations == true`
	for _, name := range []string{"one", "two", "three"} {
		w.addClaim(name, spec(w.exactly("device", 1, shared)))
		w.addPod(name, withClaim(name))
		w.awaitBoundTo(name, "a")
		if diff := cmp.Diff([]shareResult{{"open", map[resourceapi.QualifiedName]string{}}}, w.shares(w.claim(name), ids)); diff != "" {
			t.Errorf("shares of %s (-want +got):\n%s", name, diff)
		}
	}
	w.addClaim("twice", spec(w.exactly("first", 1, shared), w.exactly("second", 1, shared)))
	w.addPod("twice", withClaim("twice"))
	w.awaitBoundTo("twice", "a")
	if got := w.shares(w.claim("twice"), ids); len(got) != 2 || got[0].Device != "open" || got[1].Device != "open" {
		t.Errorf("want two shares of the device, got %v", got)
	}

	// The other device is for one.
	w.addClaim("alone", spec(w.exactly("device", 1, `device.attributes["$DRIVER"].type == "closed"`)))
	w.addPod("alone", withClaim("alone"))
	w.awaitBound("alone")
	if r := w.claim("alone").Status.Allocation.Devices.Results[0]; r.ShareID != nil || r.ConsumedCapacity != nil {
		t.Errorf("a device for one has the share ID %v and consumes %v", *r.ShareID, r.ConsumedCapacity)
	}
	w.addClaim("too-late", spec(w.exactly("device", 1, `device.attributes["$DRIVER"].type == "closed"`)))
	w.addPod("too-late", withClaim("too-late"))
	w.awaitUnschedulable("too-late", "held", "if claim "+w.name+"/alone were released")
}

// Two tenants get a GPU each although one would do, where the node keeps its shares to one namespace. Who finds none waits for the last
// share of the other one, or until the node allows it.
func TestSharesOfAGPUAreOneNamespaces(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.driver, w.class = gpuDriver, w.name+"-shares"
	w.addClass(w.class, `device.driver == "$DRIVER"`)
	apart := func(name string) resourceapi.Device {
		d := divisible(name, "40Gi")
		d.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"sharedByNamespace": {BoolValue: ptr.To(true)}}
		return d
	}
	w.addNode("two", apart("gpu-0"), apart("gpu-1"))
	w.addNode("one")
	one := w.addSlice(w.slice("one", apart("gpu-0")))
	w.addNode("allows", divisible("gpu-0", "40Gi"))
	startScheduler(t, w.name, schedulerSetup{})
	other := worldOf(t, &scheduler{name: w.name})
	other.driver, other.class = w.driver, w.class

	add := func(tenant *world, name, node string) {
		t.Helper()
		tenant.addClaim(name, spec(tenant.share("gpu", nil)))
		tenant.addPod(name, withClaim(name), w.onNode(node), func(p *v1.Pod) { p.Spec.NodeSelector[worldLabel] = w.name })
	}
	gets := func(tenant *world, name, want string) {
		t.Helper()
		tenant.awaitBound(name)
		if diff := cmp.Diff([]string{want}, devices(tenant.claim(name))); diff != "" {
			t.Errorf("devices of %s (-want +got):\n%s", name, diff)
		}
	}
	for _, step := range []struct {
		tenant           *world
		name, node, want string
	}{
		{w, "first", "two", "gpu-0"},
		{other, "second", "two", "gpu-1"},
		{w, "third", "two", "gpu-0"},
		{w, "sole", "one", "gpu-0"},
		{w, "fellow", "one", "gpu-0"},
		{w, "mixed-1", "allows", "gpu-0"},
		{other, "mixed-2", "allows", "gpu-0"},
	} {
		add(step.tenant, step.name, step.node)
		gets(step.tenant, step.name, step.want)
	}

	add(other, "waits", "one")
	other.awaitUnschedulable("waits", "1 of 1 "+w.class+" devices shared by another namespace")
	w.deletePod("sole")
	w.awaitClaim("sole", "is free", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation == nil })
	w.deletePod("fellow")
	gets(other, "waits", "gpu-0")

	add(w, "late", "one")
	w.awaitUnschedulable("late", "shared by another namespace")
	one.Spec.Devices[0].Attributes = nil
	_, err := w.client.ResourceV1().ResourceSlices().Update(w.ctx, one, metav1.UpdateOptions{})
	w.must(err, "letting node one share across namespaces")
	gets(w, "late", "gpu-0")
}
