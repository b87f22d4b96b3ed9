// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

const driver = "gpu.example.com"

// scene is a cluster with two claims and valid allocations for them, to be spoiled in one way.
type scene struct {
	Cluster
	claims      []*resourceapi.ResourceClaim
	allocations []resourceapi.AllocationResult
}

func attribute(text string) map[resourceapi.QualifiedName]resourceapi.DeviceAttribute {
	return map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"root": {StringValue: &text}}
}

// newScene has, on the node: whole GPUs gpu-0 to gpu-3 of which gpu-3 is held; partitions part-0 to part-2, of which
// two fit and none is held; shared devices share-0 with 10 memory of which 4 are held, and the network device net.
func newScene() *scene {
	s := &scene{Cluster: Cluster{
		Node: &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", Labels: map[string]string{"rack": "r1"}}},
		Features: structured.Features{
			AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true, FractionalCapacityRange: true,
			PartitionableDevices: true, PrioritizedList: true, CompatibilityGroups: true, ListTypeAttributes: true, DerivedAttributes: true,
			OptionalNodeOperations: true,
		},
	}}
	gpus := s.slice("gpus", "whole", 1)
	gpus.NodeName = ptr.To("node")
	for i := range 4 {
		gpus.Devices = append(gpus.Devices, resourceapi.Device{Name: fmt.Sprintf("gpu-%d", i), Attributes: attribute(fmt.Sprintf("r%d", i/2))})
	}
	s.hold("whole", "gpu-3", nil, "")

	parts := s.slice("parts", "parts", 2)
	parts.NodeName = ptr.To("node")
	for i := range 3 {
		parts.Devices = append(parts.Devices, resourceapi.Device{Name: fmt.Sprintf("part-%d", i), ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
			CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"slices": {Value: resource.MustParse("3")}},
			CompatibilityGroups: []string{"a", "b"},
		}}})
	}
	sets := s.slice("sets", "parts", 2)
	sets.NodeName = ptr.To("node")
	sets.SharedCounters = []resourceapi.CounterSet{{Name: "gpu", Counters: map[string]resourceapi.Counter{"slices": {Value: resource.MustParse("7")}}}}

	shares := s.slice("shares", "shares", 1)
	shares.AllNodes = ptr.To(true)
	shares.Devices = []resourceapi.Device{{
		Name: "share-0", AllowMultipleAllocations: ptr.To(true), Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			"memory": {Value: resource.MustParse("10"), RequestPolicy: &resourceapi.CapacityRequestPolicy{
				Default: ptr.To(resource.MustParse("1")), ValidRange: &resourceapi.CapacityRequestPolicyRange{
					Min: ptr.To(resource.MustParse("1")), Max: ptr.To(resource.MustParse("9")), Step: ptr.To(resource.MustParse("2")),
				},
			}},
		},
	}}
	s.hold("shares", "share-0", ptr.To(types.UID("held")), "4")

	net := s.slice("net", "net", 1)
	net.NodeSelector = &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{
		Key: "rack", Operator: v1.NodeSelectorOpIn, Values: []string{"r1", "r2"},
	}}}}}
	net.Devices = []resourceapi.Device{{Name: "nic", BindingConditions: []string{"attached"}, BindingFailureConditions: []string{"failed"}}}

	s.Classes = []*resourceapi.DeviceClass{class("any", "true"), class("pool", `device.driver == "gpu.example.com"`)}
	s.Classes[1].Spec.Config = []resourceapi.DeviceClassConfiguration{{DeviceConfiguration: config("class")}}

	gpuClaim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "gpus"}}
	gpuClaim.Spec.Devices = resourceapi.DeviceClaim{
		Requests: []resourceapi.DeviceRequest{
			{Name: "pair", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "pool", AllocationMode: "ExactCount", Count: 2}},
			{Name: "part", FirstAvailable: []resourceapi.DeviceSubRequest{
				{Name: "five", DeviceClassName: "any", AllocationMode: "ExactCount", Count: 5},
				{Name: "two", DeviceClassName: "any", AllocationMode: "ExactCount", Count: 2},
			}},
		},
		Constraints: []resourceapi.DeviceConstraint{{Requests: []string{"pair"}, MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(driver + "/root"))}},
		Config: []resourceapi.DeviceClaimConfiguration{
			{DeviceConfiguration: config("all")},
			{Requests: []string{"part/two"}, DeviceConfiguration: config("two")},
			{Requests: []string{"part/five"}, DeviceConfiguration: config("five")},
		},
	}
	sharedClaim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: "shared"}}
	sharedClaim.Spec.Devices.Requests = []resourceapi.DeviceRequest{
		{Name: "memory", Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: "any", AllocationMode: "ExactCount", Count: 1,
			Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("4")}},
		}},
		{Name: "nic", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "any", AllocationMode: "ExactCount", Count: 1}},
	}
	s.claims = []*resourceapi.ResourceClaim{gpuClaim, sharedClaim}

	nic := result("nic", "net", "nic")
	nic.BindingConditions, nic.BindingFailureConditions = []string{"attached"}, []string{"failed"}
	memory := result("memory", "shares", "share-0")
	memory.ShareID = ptr.To(types.UID("mine"))
	memory.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("5")}
	s.allocations = []resourceapi.AllocationResult{
		{
			Devices: resourceapi.DeviceAllocationResult{
				Results: []resourceapi.DeviceRequestAllocationResult{
					result("pair", "whole", "gpu-0"), result("pair", "whole", "gpu-1"),
					result("part/two", "parts", "part-0"), result("part/two", "parts", "part-1"),
				},
				Config: []resourceapi.DeviceAllocationConfiguration{
					{Source: "FromClass", Requests: []string{"pair"}, DeviceConfiguration: config("class")},
					{Source: "FromClaim", DeviceConfiguration: config("all")},
					{Source: "FromClaim", Requests: []string{"part/two"}, DeviceConfiguration: config("two")},
				},
			},
			NodeSelector: nodeName("node"),
		},
		{
			Devices:      resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{memory, nic}},
			NodeSelector: net.NodeSelector.DeepCopy(),
		},
	}
	return s
}

func (s *scene) slice(name, pool string, count int64) *resourceapi.ResourceSliceSpec {
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}}
	slice.Spec.Driver, slice.Spec.Pool = driver, resourceapi.ResourcePool{Name: pool, Generation: 2, ResourceSliceCount: count}
	s.Slices = append(s.Slices, slice)
	return &slice.Spec
}

func (s *scene) hold(pool, device string, share *types.UID, memory string) {
	held := result("r", pool, device)
	if held.ShareID = share; share != nil {
		held.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	}
	s.Held = append(s.Held, resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{held}}})
}

func (s *scene) result(claim, i int) *resourceapi.DeviceRequestAllocationResult {
	return &s.allocations[claim].Devices.Results[i]
}

func (s *scene) exactly(claim, i int) *resourceapi.ExactDeviceRequest {
	return s.claims[claim].Spec.Devices.Requests[i].Exactly
}

func result(request, pool, device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driver, Pool: pool, Device: device}
}

func class(name, selector string) *resourceapi.DeviceClass {
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}}
	class.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: selector}}}
	return class
}

func config(name string) resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: name}}
}

func nodeName(name string) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchFields: []v1.NodeSelectorRequirement{{
		Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{name},
	}}}}}
}

func TestAValidAllocationIsValid(t *testing.T) {
	s := newScene()
	if err := Check(s.Cluster, s.claims, s.allocations); err != nil {
		t.Error(err)
	}
}

func TestEveryRuleIsChecked(t *testing.T) {
	taint := func(s *scene) *resourceapi.Device {
		device := &s.Slices[0].Spec.Devices[0]
		device.Taints = []resourceapi.DeviceTaint{{Key: "broken", Value: "yes", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		return device
	}
	tests := map[string]struct {
		spoil func(s *scene)
		want  string // empty: still valid
	}{
		"an allocation is missing":            {func(s *scene) { s.allocations = s.allocations[:1] }, "1 allocations for 2 claims"},
		"the request is unknown":              {func(s *scene) { s.result(0, 0).Request = "other" }, "no such request"},
		"the subrequest has no parent's name": {func(s *scene) { s.result(0, 2).Request = "two" }, "no such request"},
		"the pool is unknown":                 {func(s *scene) { s.result(0, 0).Pool = "other" }, "no such pool"},
		"the device is unknown":               {func(s *scene) { s.result(0, 0).Device = "gpu-9" }, "no such device"},
		"the device is on another node":       {func(s *scene) { s.Slices[0].Spec.NodeName = ptr.To("other") }, "no such device for node node"},
		"the device's rack is another":        {func(s *scene) { s.Node.Labels["rack"] = "r9" }, "no such device for node node"},
		"the pool is incomplete":              {func(s *scene) { s.Slices[0].Spec.Pool.ResourceSliceCount = 2 }, "has 1 of 2 slices"},
		"a newer generation has begun": {func(s *scene) {
			newer := s.slice("new", "whole", 1)
			newer.Pool.Generation, newer.NodeName = 3, ptr.To("node")
		}, "no such device"},
		"a newer generation is for others and the outdated one not whole": {func(s *scene) {
			s.slice("new", "whole", 1).Pool.Generation = 3
			s.Slices[0].Spec.Pool.ResourceSliceCount = 2
		}, "no such device"},
		"a newer generation is for others only": {func(s *scene) { s.slice("new", "whole", 1).Pool.Generation = 3 }, ""},
		"an older generation is still there":    {func(s *scene) { s.slice("old", "whole", 5).Pool.Generation = 1 }, ""},
		"slices disagree about their number":    {func(s *scene) { s.Slices[1].Spec.Pool.ResourceSliceCount = 3 }, "disagree"},
		"a device name is there twice":          {func(s *scene) { s.Slices[0].Spec.Devices[1].Name = "gpu-0" }, "gpu-0 is there twice"},
		"a counter set does not exist":          {func(s *scene) { s.Slices[2].Spec.SharedCounters[0].Name = "other" }, "does not exist"},
		"a counter does not exist":              {func(s *scene) { s.Slices[2].Spec.SharedCounters[0].Counters = nil }, "does not have"},
		"the class does not exist":              {func(s *scene) { s.exactly(0, 0).DeviceClassName = "other" }, "no device class"},
		"the class does not match":              {func(s *scene) { s.Classes[1].Spec.Selectors[0].CEL.Expression = "false" }, "does not match"},
		"a selector of the request fails":       {func(s *scene) { s.exactly(0, 0).Selectors = class("", `device.attributes["x"].y == 1`).Spec.Selectors }, "no such key"},
		"a request got too little":              {func(s *scene) { s.exactly(0, 0).Count = 3 }, "got 2 devices, wants 3"},
		"a request got nothing":                 {func(s *scene) { s.allocations[1].Devices.Results = s.allocations[1].Devices.Results[:1] }, "request nic: got no device"},
		"two alternatives of one request":       {func(s *scene) { s.result(0, 3).Request = "part/five" }, "two alternatives"},
		"all were wanted but one was left":      {func(s *scene) { s.exactly(0, 0).AllocationMode = "All" }, "did not get gpu.example.com/whole/gpu-2"},
		"all were wanted of an unusable pool":   {func(s *scene) { s.exactly(0, 0).AllocationMode, s.Slices[4].Spec.Pool.ResourceSliceCount = "All", 9 }, "wants all devices, but pool"},
		"all were wanted, and a pool that is not for the node is unusable": {func(s *scene) {
			s.Classes = append(s.Classes, class("net", `device.driver == "net.example.com"`))
			s.Slices[4].Spec.Driver, s.result(1, 1).Driver = "net.example.com", "net.example.com"
			s.exactly(1, 1).DeviceClassName, s.exactly(1, 1).AllocationMode = "net", "All"
			s.slice("broken", "broken", 5).NodeName = ptr.To("other")
		}, ""},
		"a held device":                        {func(s *scene) { s.result(0, 1).Device = "gpu-3" }, "the device is held"},
		"a device twice":                       {func(s *scene) { s.result(0, 1).Device = "gpu-0" }, "was given to claim gpus"},
		"a shared device that is held alone":   {func(s *scene) { s.hold("shares", "share-0", nil, "") }, "for himself alone"},
		"a taint":                              {func(s *scene) { taint(s) }, "broken=yes:NoSchedule is not tolerated"},
		"a taint without effect":               {func(s *scene) { taint(s).Taints[0].Effect = resourceapi.DeviceTaintEffectNone }, ""},
		"other tolerations than the request's": {func(s *scene) { s.result(0, 0).Tolerations = []resourceapi.DeviceToleration{{Operator: "Exists"}} }, "tolerations are not those"},
		"a toleration for another value": {func(s *scene) {
			taint(s)
			s.exactly(0, 0).Tolerations = []resourceapi.DeviceToleration{{Key: "broken", Operator: "Equal", Value: "no"}}
		}, "is not tolerated"},
		"admin access that was not asked for":  {func(s *scene) { s.result(0, 0).AdminAccess = ptr.To(true) }, "admin access"},
		"admin access that was not given":      {func(s *scene) { s.exactly(1, 1).AdminAccess = ptr.To(true) }, "admin access"},
		"other binding conditions":             {func(s *scene) { s.result(1, 1).BindingConditions = nil }, "binding conditions are not those"},
		"other binding failure conditions":     {func(s *scene) { s.result(1, 1).BindingFailureConditions = nil }, "binding conditions are not those"},
		"binding conditions that are disabled": {func(s *scene) { s.Features.DeviceBindingAndStatus = false }, "disabled"},
		"skipped operations not copied":        {func(s *scene) { s.Slices[0].Spec.SkipNodeOperations = []resourceapi.SkipNodeOperation{"*"} }, "not those of the slice"},
		"skipped operations that are disabled": {func(s *scene) {
			s.Features.OptionalNodeOperations = false
			s.result(0, 0).SkipNodeOperations = []resourceapi.SkipNodeOperation{"*"}
		}, "not those of the slice"},
		"counters that are disabled": {func(s *scene) { s.Features.PartitionableDevices = false }, "consumes counters, which are disabled"},
		"counters are exceeded": {func(s *scene) {
			s.Slices[2].Spec.SharedCounters[0].Counters["slices"] = resourceapi.Counter{Value: resource.MustParse("5")}
		}, "6.000 of counter gpu/slices"},
		"counters are exceeded with what is held": {func(s *scene) { s.hold("parts", "part-2", nil, "") }, "9.000 of counter gpu/slices"},
		"counters were exceeded before, and a device gets one more share": {func(s *scene) {
			s.Slices[3].Spec.Pool.ResourceSliceCount = 2
			s.Slices[3].Spec.Devices[0].ConsumesCounters = s.Slices[1].Spec.Devices[0].ConsumesCounters
			sets := s.slice("sets of shares", "shares", 2)
			sets.AllNodes = ptr.To(true)
			sets.SharedCounters = []resourceapi.CounterSet{{Name: "gpu", Counters: map[string]resourceapi.Counter{"slices": {Value: resource.MustParse("1")}}}}
		}, ""},
		"no compatibility group in common": {func(s *scene) { s.Slices[1].Spec.Devices[0].ConsumesCounters[0].CompatibilityGroups = []string{"c"} }, "not compatible"},
		"one has no compatibility group":   {func(s *scene) { s.Slices[1].Spec.Devices[0].ConsumesCounters[0].CompatibilityGroups = nil }, "not compatible"},
		"a value that does not match":      {func(s *scene) { s.result(0, 1).Device = "gpu-2" }, "do not match"},
		"an attribute that is missing":     {func(s *scene) { s.Slices[0].Spec.Devices[0].Attributes = nil }, "no attribute gpu.example.com/root"},
		"values that are not distinct": {func(s *scene) {
			c := &s.claims[0].Spec.Devices.Constraints[0]
			c.MatchAttribute, c.DistinctAttribute = nil, c.MatchAttribute
		}, "not distinct"},
		"values that match as lists": {func(s *scene) {
			s.Slices[0].Spec.Devices[1].Attributes["root"] = resourceapi.DeviceAttribute{StringValues: []string{"other", "r0"}}
		}, ""},
		"values of different types": {func(s *scene) {
			s.Slices[0].Spec.Devices[1].Attributes["root"] = resourceapi.DeviceAttribute{VersionValue: ptr.To("r0")}
		}, "do not match"},
		"derived values that do not match": {func(s *scene) {
			s.exactly(0, 0).DerivedAttributes = []resourceapi.DeviceDerivedAttribute{{Name: driver + "/root", Expression: `device.attributes["gpu.example.com"].n`}}
			for i := range 2 {
				s.Slices[0].Spec.Devices[i].Attributes["n"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(i))}
			}
		}, "do not match"},
		"no share ID":                        {func(s *scene) { s.result(1, 0).ShareID = nil }, "has no share ID"},
		"a share ID that is taken":           {func(s *scene) { s.result(1, 0).ShareID = ptr.To(types.UID("held")) }, "share ID held is there twice"},
		"a share of a whole device":          {func(s *scene) { s.result(0, 0).ShareID = ptr.To(types.UID("x")) }, "does not allow multiple allocations"},
		"shares that are disabled":           {func(s *scene) { s.Features.ConsumableCapacity = false }, "disabled"},
		"capacity that is not rounded":       {func(s *scene) { s.result(1, 0).ConsumedCapacity["memory"] = resource.MustParse("4") }, "consumes 4 of memory, which should be 5.000"},
		"capacity that is not said":          {func(s *scene) { s.result(1, 0).ConsumedCapacity = nil }, "does not say what it consumes"},
		"capacity that the device has not":   {func(s *scene) { s.result(1, 0).ConsumedCapacity["x"] = resource.MustParse("1") }, "consumes x, which the device does not have"},
		"capacity asked for that it has not": {func(s *scene) { s.exactly(1, 0).Capacity.Requests["x"] = resource.MustParse("1") }, "the device has no capacity x"},
		"capacity over the maximum":          {func(s *scene) { s.exactly(1, 0).Capacity.Requests["memory"] = resource.MustParse("10") }, "more than the largest valid value"},
		"capacity over what is left":         {func(s *scene) { s.hold("shares", "share-0", ptr.To(types.UID("third")), "2") }, "11.000 of capacity memory would be consumed, there are 10"},
		"a whole device that is too small": {func(s *scene) {
			s.Slices[0].Spec.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("1")}}
			s.exactly(0, 0).Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("1001m")}}
		}, "the device is too small"},
		"configuration of the class is missing": {func(s *scene) { s.allocations[0].Devices.Config = s.allocations[0].Devices.Config[1:] }, "the configuration is"},
		"configuration in another order":        {func(s *scene) { slices.Reverse(s.allocations[0].Devices.Config) }, "the configuration is"},
		"configuration for other requests":      {func(s *scene) { s.allocations[0].Devices.Config[0].Requests = nil }, "the configuration is"},
		"no node selector":                      {func(s *scene) { s.allocations[1].NodeSelector = nil }, "not all of its devices can"},
		"a node selector that is too wide":      {func(s *scene) { s.allocations[0].NodeSelector = s.allocations[1].NodeSelector }, "its devices need fields"},
		"a node selector that is too narrow":    {func(s *scene) { s.allocations[1].NodeSelector = nodeName("node") }, "its devices need fields"},
		"a node selector for another node":      {func(s *scene) { s.allocations[0].NodeSelector = nodeName("other") }, "does not select node node"},
		"a node selector with two terms": {func(s *scene) {
			terms := &s.allocations[0].NodeSelector.NodeSelectorTerms
			*terms = append(*terms, (*terms)[0])
		}, "has 2 terms"},
		"a device that binds to the node": {func(s *scene) { s.Slices[4].Spec.Devices[0].BindsToNode = ptr.To(true) }, "its devices need fields"},
		"too many results": {func(s *scene) {
			for range 31 {
				s.allocations[1].Devices.Results = append(s.allocations[1].Devices.Results, *s.result(1, 1))
			}
		}, "33 results, at most 32"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScene()
			test.spoil(s)
			err := Check(s.Cluster, s.claims, s.allocations)
			switch {
			case test.want == "" && err != nil:
				t.Errorf("valid, but: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("want an error with %q, got: %v", test.want, err)
			}
		})
	}
}

func TestStepsAreWholeNumbersUnlessFractionsAreEnabled(t *testing.T) {
	policy := &resourceapi.CapacityRequestPolicy{ValidRange: &resourceapi.CapacityRequestPolicyRange{
		Min: ptr.To(resource.MustParse("500m")), Step: ptr.To(resource.MustParse("250m")),
	}}
	asked := resource.MustParse("1100m")
	for fractions, want := range map[bool]string{true: "1250m", false: "2"} {
		got, err := round(&asked, resourceapi.DeviceCapacity{Value: resource.MustParse("10"), RequestPolicy: policy}, fractions)
		if err != nil || got.Cmp(exact(resource.MustParse(want))) != 0 {
			t.Errorf("with fractions %v: %v, %v; want %s", fractions, got, err, want)
		}
	}
}

func TestAmountsAreRoundedAsThePolicySays(t *testing.T) {
	q := func(text string) *resource.Quantity {
		if text == "" {
			return nil
		}
		return ptr.To(resource.MustParse(text))
	}
	inRange := func(least, most, step string) *resourceapi.CapacityRequestPolicy {
		return &resourceapi.CapacityRequestPolicy{Default: q("2"), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: q(least), Max: q(most), Step: q(step)}}
	}
	values := &resourceapi.CapacityRequestPolicy{Default: q("2"), ValidValues: []resource.Quantity{*q("2"), *q("5")}}
	tests := map[string]struct {
		asked  string
		policy *resourceapi.CapacityRequestPolicy
		want   string // empty: refused
	}{
		"without a policy all is consumed":        {"", nil, "10"},
		"without a policy what is asked is":       {"3", nil, "3"},
		"the default":                             {"", values, "2"},
		"a valid value":                           {"5", values, "5"},
		"up to the next valid value":              {"2100m", values, "5"},
		"over all valid values":                   {"6", values, ""},
		"up to the minimum":                       {"1", inRange("2", "9", ""), "2"},
		"as it is without a step":                 {"3500m", inRange("2", "9", ""), "3500m"},
		"up to the next step":                     {"3", inRange("2", "9", "2"), "4"},
		"up to the next fraction":                 {"250m", inRange("100m", "2", "100m"), "300m"},
		"over the maximum after rounding":         {"9", inRange("2", "9", "2"), ""},
		"beyond 64 bits by rounding":              {"9223372036854775807", inRange("2", "", "2"), "9223372036854775808"},
		"without a maximum":                       {"1000", inRange("2", "", ""), "1000"},
		"the default, also if it is out of range": {"", inRange("3", "9", "1"), "2"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := round(q(test.asked), resourceapi.DeviceCapacity{Value: *q("10"), RequestPolicy: test.policy}, true)
			switch {
			case test.want == "" && err == nil:
				t.Errorf("got %v, want it refused", got)
			case test.want != "" && (err != nil || got.Cmp(exact(*q(test.want))) != 0):
				t.Errorf("got %v, %v, want %s", got, err, test.want)
			}
		})
	}
}
