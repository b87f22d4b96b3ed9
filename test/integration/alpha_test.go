// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
)

// The features that are alpha in 1.37. DRANodeAllocatableResources is the one that only kube-scheduler itself can serve.
const alphaGates = "DRAListTypeAttributes,DRADerivedAttributes,DRADeviceCompatibilityGroups,DRAOptionalNodeOperations"

// fractionalGate is beta in 1.37, and on only in a cluster that is never to be set back to an older version.
const fractionalGate = "DRAFractionalCapacityRange"

// The profiles of two schedulers: one with the gates of the API server, one in which they are off.
const gatesOn, gatesOff = "gates-on", "gates-off"

// TestFeaturesThatAreOffByDefault has an API server with all gates and versions on, and two schedulers.
func TestFeaturesThatAreOffByDefault(t *testing.T) {
	t.Parallel()
	gated := startGatedCluster(t)
	for name, test := range map[string]func(*testing.T, *world){
		"list-typed attributes":       testListTypedAttributes,
		"derived attributes":          testDerivedAttributes,
		"compatibility groups":        testCompatibilityGroups,
		"optional node operations":    testOptionalNodeOperations,
		"fractional capacity ranges":  testFractionalCapacityRanges,
		"node allocatable resources":  testNodeAllocatableResources,
		"an allocation that needs it": testAllocationThatSkipsOperations,
		"rules of older versions":     testRulesOfOlderVersions,

		"a group shares a claim":      testGroupSharesAClaim,
		"a group gets all or nothing": testGroupGetsAllOrNothing,
		"claims of a group":           testClaimsOfAGroup,
		"a group gives up a claim":    testGroupGivesUpAnAllocation,
		"a group preempts":            testGroupPreempts,
		"extended resources of pods":  testGroupPreemptsForExtendedResources,
		"a group is evicted":          testGroupIsEvictedAsAWhole,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorldIn(t, gated)
			w.schedulerName = gatesOn
			test(t, w)
		})
	}
}

func startGatedCluster(t *testing.T) *localcluster.Cluster {
	t.Helper()
	gates := map[string]bool{
		fractionalGate: true, "DRANodeAllocatableResources": true, "GenericWorkload": true, "DRAWorkloadResourceClaims": true,
		"WatchList": false, // informers list first, as with an older API server
	}
	for gate := range strings.SplitSeq(alphaGates, ",") {
		gates[gate] = true
	}
	gated, err := localcluster.Start(t.Context(), recorded.of(localcluster.Options{
		Progress: os.Stderr, FeatureGates: gates, ControllerManagerArgs: []string{"--node-monitor-grace-period=2h"},
		RuntimeConfig: map[string]bool{"scheduling.k8s.io/v1beta1": true, "resource.k8s.io/v1beta2": true, "resource.k8s.io/v1alpha3": true},
	}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			gated.Keep()
		}
		if err := gated.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := gated.Apply(t.Context(), filepath.Join(manifests, "base/access")); err != nil {
		t.Fatal(err)
	}
	binary, err := schedulerBinary()
	if err != nil {
		t.Fatal(err)
	}
	for profile, off := range map[string]string{
		gatesOn:  "DRANodeAllocatableResources=false",
		gatesOff: strings.ReplaceAll(alphaGates+","+fractionalGate, ",", "=false,") + "=false,DRANodeAllocatableResources=false",
	} {
		_, err := gated.StartScheduler(t.Context(), localcluster.SchedulerOptions{
			Name: profile, Binary: binary, Args: []string{"--feature-gates=" + off},
			Config: writeConfig(t, strings.Replace(configHead+goodProfile, "config-test", profile, 1)),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return gated
}

// withGates says whether the scheduler of the pod has the gates on.
func withGates(profile string) podOption { return withScheduler(profile) }

func (w *world) attribute(name string) *resourceapi.FullyQualifiedName {
	return ptr.To(resourceapi.FullyQualifiedName(w.expand(name)))
}

// Devices match if one value is in all of their lists, and are distinct if no value is in two.
func testListTypedAttributes(t *testing.T, w *world) {
	domains := [][]string{{"a", "b"}, {"c"}, {"b", "c"}}
	w.addNode("n", gpus(h100, 3, func(i int, d *resourceapi.Device) {
		d.Attributes["domains"] = resourceapi.DeviceAttribute{StringValues: domains[i]}
	})...)
	claim := func(n int64, change func(*resourceapi.DeviceConstraint), selectors ...string) resourceapi.ResourceClaimSpec {
		s := spec(w.exactly("gpus", n, selectors...))
		if change != nil {
			s.Devices.Constraints = make([]resourceapi.DeviceConstraint, 1)
			change(&s.Devices.Constraints[0])
		}
		return s
	}
	match := func(c *resourceapi.DeviceConstraint) { c.MatchAttribute = w.attribute("$DRIVER/domains") }
	distinct := func(c *resourceapi.DeviceConstraint) { c.DistinctAttribute = w.attribute("$DRIVER/domains") }
	for _, tc := range []struct {
		name string
		spec resourceapi.ResourceClaimSpec
		want []string
	}{
		{"match", claim(2, match), []string{"gpu-0", "gpu-2"}},
		{"distinct", claim(2, distinct), []string{"gpu-0", "gpu-1"}},
		{"includes", claim(1, nil, `device.attributes["$DRIVER"].domains.includes("c")`), []string{"gpu-1"}},
	} {
		w.addClaim(tc.name, tc.spec)
		w.addPod(tc.name, withClaim(tc.name))
		w.awaitBoundTo(tc.name, "n")
		if diff := cmp.Diff(tc.want, devices(w.claim(tc.name))); diff != "" {
			t.Errorf("devices of %s (-want +got):\n%s", tc.name, diff)
		}
		w.deletePod(tc.name)
		w.awaitClaim(tc.name, "is free", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation == nil })
	}
	w.addClaim("three", claim(3, match))
	w.addPod("three", withClaim("three"))
	w.awaitUnschedulable("three", "at most 2 free devices of one node share")

	// A list means nothing without the gate, and equals nothing.
	w.addClaim("off", claim(2, match))
	w.addPod("off", withClaim("off"), withGates(gatesOff))
	w.awaitUnschedulable("off", "share "+w.driver+"/domains")
}

// A GPU and a NIC match in what their requests derive from different attributes.
func testDerivedAttributes(t *testing.T, w *world) {
	w.addNode("n", append(gpus(h100, 2),
		resourceapi.Device{Name: "nic-right", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"side": text("right")}})...)
	claim := func(ofGPU string) resourceapi.ResourceClaimSpec {
		derive := func(r resourceapi.DeviceRequest, expression string) resourceapi.DeviceRequest {
			r.Exactly.DerivedAttributes = []resourceapi.DeviceDerivedAttribute{{Name: "derived/numa", Expression: w.expand(expression)}}
			return r
		}
		s := spec(
			derive(w.exactly("gpu", 1, `device.attributes["$DRIVER"].?type.orValue("") == "gpu"`), ofGPU),
			derive(w.exactly("nic", 1, `device.attributes["$DRIVER"].?side.orValue("") != ""`), `device.attributes["$DRIVER"].side == "left" ? 0 : 1`),
		)
		s.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: w.attribute("derived/numa")}}
		return s
	}
	const numa = `device.attributes["resource.kubernetes.io"].numaNode`
	w.addClaim("off", claim(numa))
	w.addPod("off", withClaim("off"), withGates(gatesOff))
	w.awaitUnschedulable("off", "claim "+w.name+"/off", `request "gpu"`, "derivedAttributes", "DRADerivedAttributes is disabled")

	w.addClaim("fails", claim(`device.attributes["$DRIVER"].side`))
	w.addPod("fails", withClaim("fails"))
	w.awaitUnschedulable("fails", "derived attribute derived/numa", "no such key: side")

	w.addClaim("wanted", claim(numa))
	w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "n")
	want := []result{{Request: "gpu", Device: "gpu-1"}, {Request: "nic", Device: "nic-right"}}
	if diff := cmp.Diff(want, results(w.claim("wanted"))); diff != "" {
		t.Errorf("allocated devices (-want +got):\n%s", diff)
	}
}

// Partitions of one GPU are in use together only if they have a group in common.
func testCompatibilityGroups(t *testing.T, w *world) {
	w.addNode("n")
	parts, counters := w.slice("n"), w.slice("n")
	counters.Name += "-counters"
	for _, slice := range []*resourceapi.ResourceSlice{parts, counters} {
		slice.Spec.Pool.ResourceSliceCount = 2
	}
	counters.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "gpu-0", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}}}}
	for _, kind := range []string{"mig", "vgpu"} {
		for _, n := range []string{"-0", "-1"} {
			parts.Spec.Devices = append(parts.Spec.Devices, resourceapi.Device{
				Name:       kind + n,
				Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": text(kind)},
				ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
					CounterSet: "gpu-0", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("10Gi")}}, CompatibilityGroups: []string{kind},
				}},
			})
		}
	}
	w.addSlice(parts)
	w.addSlice(counters)
	for _, kind := range []string{"mig", "vgpu"} {
		w.addTemplate(kind, w.partition(kind))
	}
	w.addPod("off", withTemplate("mig"), withGates(gatesOff))
	w.awaitUnschedulable("off", "1 of 2 slices of generation 1, 1 ignored because they use compat")

	for _, pod := range []string{"mig-0", "mig-1"} {
		w.addPod(pod, withTemplate("mig"))
		bound := w.awaitBoundTo(pod, "n")
		if diff := cmp.Diff([]string{pod}, devices(w.claim(claimName(bound, "mig")))); diff != "" {
			t.Errorf("devices of %s (-want +got):\n%s", pod, diff)
		}
	}
	w.addPod("vgpu", withTemplate("vgpu"))
	w.awaitUnschedulable("vgpu", "devices incompatible with devices in use", "would fit on node")
	w.deletePod("mig-0")
	w.deletePod("mig-1")
	w.awaitBoundTo("vgpu", "n")
}

// skipping is what a node declares whose kubelet can skip node operations.
const skipping = "DRAOptionalNodeOperations"

// declare has a node say that its kubelet has a feature.
func (w *world) declare(suffix, feature string) {
	w.t.Helper()
	_, err := w.client.CoreV1().Nodes().Patch(w.ctx, w.nodeName(suffix), types.MergePatchType,
		fmt.Appendf(nil, `{"status":{"declaredFeatures":[%q]}}`, feature), metav1.PatchOptions{}, "status")
	w.must(err, "declaring features of node %s", suffix)
}

func (w *world) addSkippingSlice(suffix string) {
	w.t.Helper()
	slice := w.slice(suffix, gpus(h100, 2)...)
	slice.Spec.SkipNodeOperations = []resourceapi.SkipNodeOperation{resourceapi.SkipNodeOperationAll}
	w.addSlice(slice)
}

// skipped are the operations that the kubelet skips for the claim's first device.
func skipped(claim *resourceapi.ResourceClaim) []resourceapi.SkipNodeOperation {
	return claim.Status.Allocation.Devices.Results[0].SkipNodeOperations
}

// Devices for which the kubelet calls no driver are for nodes whose kubelet knows of that; the claim tells it.
func testOptionalNodeOperations(t *testing.T, w *world) {
	for _, suffix := range []string{"able", "unable"} {
		w.addNode(suffix)
		w.addSkippingSlice(suffix)
	}
	w.declare("able", skipping)
	claim := spec(w.exactly("gpu", 1))
	bound := func(name, node string, want ...resourceapi.SkipNodeOperation) {
		t.Helper()
		w.awaitBoundTo(name, node)
		if diff := cmp.Diff(want, skipped(w.claim(name))); diff != "" {
			t.Errorf("operations to skip for %s (-want +got):\n%s", name, diff)
		}
	}
	for _, name := range []string{"first", "second"} {
		w.addClaim(name, claim)
		w.addPod(name, withClaim(name))
		bound(name, "able", resourceapi.SkipNodeOperationAll)
	}
	w.addClaim("third", claim)
	w.addPod("third", withClaim("third"))
	w.awaitUnschedulable("third", "2 needing node operations to be skipped")
	w.declare("unable", skipping)
	bound("third", "unable", resourceapi.SkipNodeOperationAll)

	// Without the gate it is a device like any other, and nothing is skipped.
	w.addClaim("off", claim)
	w.addPod("off", withClaim("off"), withGates(gatesOff))
	bound("off", "unable")
}

// A claim that is allocated with operations to skip keeps its pod off nodes that cannot.
func testAllocationThatSkipsOperations(t *testing.T, w *world) {
	w.addNode("unable")
	pool := w.slice("network", gpus(h100, 1)...)
	pool.Spec.NodeName, pool.Spec.AllNodes = nil, ptr.To(true)
	pool.Spec.SkipNodeOperations = []resourceapi.SkipNodeOperation{resourceapi.SkipNodeOperationAll}
	w.addSlice(pool)
	w.addNode("able")
	w.declare("able", skipping)
	w.addClaim("shared", spec(w.exactly("gpu", 1)))
	w.addPod("first", withClaim("shared"))
	w.awaitBoundTo("first", "able")
	w.addPod("second", withClaim("shared"), w.onNode("unable"))
	w.awaitUnschedulable("second", "cannot skip node operations")
	w.declare("unable", skipping)
	w.awaitBoundTo("second", "unable")
}

// A device that stands for CPU or memory of its node is refused, whatever the API server permits.
func testNodeAllocatableResources(t *testing.T, w *world) {
	w.addNode("n")
	w.declare("n", "DRANodeAllocatableResources") // the API server takes such slices for no other node
	slice := w.slice("n", gpus(h100, 2, func(_ int, d *resourceapi.Device) {
		d.NodeAllocatableResources = map[v1.ResourceName]resourceapi.NodeAllocatableResource{
			v1.ResourceMemory: {Overhead: &resourceapi.NodeAllocatableOverhead{PerPod: ptr.To(resource.MustParse("1Gi"))}},
		}
	})...)
	// Its admission looks at what a watch of its own has brought.
	w.eventually("the API server has heard what the node declares", func() bool {
		_, err := w.client.ResourceV1().ResourceSlices().Create(w.ctx, slice.DeepCopy(), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err == nil
	})
	w.addSlice(slice)
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withClaim("wanted"))
	w.awaitUnschedulable("pod", "2 of 2", "standing for CPU or memory of a node (nodeAllocatableResources), which only kube-scheduler itself can account for")
}
