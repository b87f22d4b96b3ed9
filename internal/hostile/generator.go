// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"
)

// Generator draws objects. Those of the same seed, asked for in the same order, are the same.
type Generator struct {
	// Namespace is that of claims, templates and pods.
	Namespace string
	// Nodes are those that devices are for. One that has its name from there is not certain to exist.
	Nodes []string
	// Classes are the names of classes that requests ask for, beside those that this generator has made and Forget has not been told.
	Classes []string
	// SchedulerName and NodeSelector are those of pods.
	SchedulerName string
	NodeSelector  map[string]string
	// PriorityClasses are those of pods; without any, pods have none.
	PriorityClasses []string
	// AdminAccess lets requests ask for it. The namespace needs the label for that.
	AdminAccess bool

	r           *rand.Rand
	expressions []string
	wild        bool // the object may have quantities that nobody can use
	serial      int
	made        []string // names of classes
	resources   []string // extended resources of classes
}

// New returns a generator.
func New(seed uint64, namespace string, nodes ...string) *Generator {
	return &Generator{Namespace: namespace, Nodes: nodes, r: rand.New(rand.NewPCG(seed, 0)), expressions: Expressions()}
}

// Drivers are the drivers of the devices.
var Drivers = []string{"hostile.test.example", "gpu.nvidia.com", name("hostile", 63)}

// Forget tells that all classes are gone that were made.
func (g *Generator) Forget() { g.made, g.resources = nil, nil }

func one[T any](g *Generator, from ...T) T { return from[g.r.IntN(len(from))] }

// often is true three times of four.
func (g *Generator) often() bool { return g.r.IntN(4) > 0 }

// seldom is true once of eight times.
func (g *Generator) seldom() bool { return g.r.IntN(8) == 0 }

// upTo is at least 1, and often all or few of n.
func (g *Generator) upTo(n int) int { return one(g, 1, 2, n, n, 1+g.r.IntN(n)) }

func (g *Generator) quantity() resource.Quantity {
	if g.wild && !g.often() {
		return resource.MustParse(one(g, Quantities...))
	}
	return resource.MustParse(one(g, possible...))
}

func (g *Generator) next() int {
	g.serial++
	return g.serial
}

func (g *Generator) object(kind string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", kind, g.next()), Namespace: g.Namespace}
	if g.seldom() {
		m.Name = name(m.Name, 253)
	}
	if g.seldom() {
		m.Annotations = map[string]string{"test.example/" + name("x", 60): one(g, Strings...) + fmt.Sprintf("%0*d", 100_000, 0)}
	}
	return m
}

func (g *Generator) driver() string { return one(g, Drivers...) }

// qualified is the name of an attribute or a capacity.
func (g *Generator) qualified(i int) resourceapi.QualifiedName {
	if i%3 == 0 {
		return resourceapi.QualifiedName(fmt.Sprintf("%s/%s%02d", name("d", 63), "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", i))
	}
	return resourceapi.QualifiedName(fmt.Sprintf("a%d", i))
}

func (g *Generator) attribute() resourceapi.DeviceAttribute {
	switch g.r.IntN(4) {
	case 0:
		return resourceapi.DeviceAttribute{IntValue: ptr.To(one[int64](g, 0, 1, -1, math.MaxInt64, math.MinInt64))}
	case 1:
		return resourceapi.DeviceAttribute{BoolValue: ptr.To(g.often())}
	case 2:
		return resourceapi.DeviceAttribute{VersionValue: ptr.To(one(g, versions...))}
	}
	return resourceapi.DeviceAttribute{StringValue: ptr.To(one(g, Strings...))}
}

func (g *Generator) capacity(shared bool) resourceapi.DeviceCapacity {
	c := resourceapi.DeviceCapacity{Value: g.quantity()}
	if !shared || g.seldom() {
		return c
	}
	// The API server compares these with each other, which never ends with some that it takes.
	switch g.r.IntN(4) {
	case 0:
		c.Value = resource.MustParse("1000")
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default: ptr.To(resource.MustParse("1")),
			ValidRange: &resourceapi.CapacityRequestPolicyRange{
				Min: ptr.To(resource.MustParse("1")), Max: ptr.To(resource.MustParse("1000")), Step: ptr.To(resource.MustParse(one(g, "1", "3", "1m"))),
			},
		}
	case 1:
		c.Value = resource.MustParse("9E")
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{
			Default:    &c.Value,
			ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(resource.MustParse(one(g, "1n", "1m", "1", "9E")))},
		}
	case 2:
		c.Value = resource.MustParse("8Ei")
		c.RequestPolicy = &resourceapi.CapacityRequestPolicy{Default: ptr.To(resource.MustParse("1"))}
		for i := range 10 {
			c.RequestPolicy.ValidValues = append(c.RequestPolicy.ValidValues, *resource.NewQuantity(int64(1+i*i), resource.DecimalSI))
		}
	}
	return c
}

func (g *Generator) taint() resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{
		Key: one(g, "k", "test.example/"+name("k", 63)), Value: one(g, "", "v"),
		Effect: one(g, resourceapi.DeviceTaintEffectNoSchedule, resourceapi.DeviceTaintEffectNoExecute, resourceapi.DeviceTaintEffectNone),
	}
}

func (g *Generator) nodeSelector() *v1.NodeSelector {
	term := v1.NodeSelectorTerm{}
	for i := range g.upTo(20) {
		r := v1.NodeSelectorRequirement{
			Key:      fmt.Sprintf("test.example/label-%d", i),
			Operator: one(g, v1.NodeSelectorOpDoesNotExist, v1.NodeSelectorOpNotIn),
		}
		if r.Operator == v1.NodeSelectorOpNotIn {
			for j := range g.upTo(200) {
				r.Values = append(r.Values, fmt.Sprint("v", j))
			}
		}
		term.MatchExpressions = append(term.MatchExpressions, r)
	}
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{term}}
}

// counters are values of counters, of which most suffice for all.
func (g *Generator) counters(n int, most bool) map[string]resourceapi.Counter {
	all := map[string]resourceapi.Counter{}
	for i := range n {
		q := resource.MustParse("1")
		if most {
			q = resource.MustParse("8Ei")
		}
		if g.seldom() {
			q = g.quantity()
		}
		all[fmt.Sprintf("counter-%d", i)] = resourceapi.Counter{Value: q}
	}
	return all
}

// Pool returns the slices of a pool. It is whole, most often.
func (g *Generator) Pool() []*resourceapi.ResourceSlice {
	g.wild = g.seldom()
	driver, pool := g.driver(),
		one(g, one(g, g.Nodes...), one(g, g.Nodes...), fmt.Sprint("pool-", g.next()), name(fmt.Sprint("pool-", g.next()), 253))
	generation := one[int64](g, 0, 1, 1, math.MaxInt64)
	whose := g.r.IntN(4)
	counted := g.seldom()
	n := one(g, 1, 1, 1, 2, 8)
	if counted {
		n = 2
	}
	var all []*resourceapi.ResourceSlice
	for i := range n {
		slice := &resourceapi.ResourceSlice{ObjectMeta: g.object("slice"), Spec: resourceapi.ResourceSliceSpec{
			Driver: driver, Pool: resourceapi.ResourcePool{Name: pool, Generation: generation, ResourceSliceCount: int64(n)},
		}}
		slice.Namespace = ""
		spec := &slice.Spec
		if g.seldom() {
			spec.Pool.ResourceSliceCount = one[int64](g, 1, math.MaxInt64)
		}
		switch whose {
		case 0, 1:
			spec.NodeName = ptr.To(one(g, g.Nodes...))
		case 2:
			spec.AllNodes = ptr.To(true)
			if g.often() {
				spec.AllNodes, spec.NodeSelector = nil, g.nodeSelector()
			}
		case 3:
			spec.PerDeviceNodeSelection = ptr.To(true)
		}
		if counted && i == 0 {
			for j := range resourceapi.ResourceSliceMaxCounterSets {
				spec.SharedCounters = append(spec.SharedCounters, resourceapi.CounterSet{
					Name: fmt.Sprint("set-", j), Counters: g.counters(resourceapi.ResourceSliceMaxCountersPerCounterSet, true),
				})
			}
		} else {
			g.devices(spec, counted)
		}
		all = append(all, slice)
	}
	return all
}

func (g *Generator) devices(spec *resourceapi.ResourceSliceSpec, counted bool) {
	tainted, shared := g.seldom(), g.r.IntN(3) == 0
	n := g.upTo(resourceapi.ResourceSliceMaxDevices)
	if tainted || counted {
		n = g.upTo(resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures)
	}
	attributes := g.upTo(resourceapi.ResourceSliceMaxAttributesAndCapacitiesPerDevice)
	if attributes*n > 2000 {
		attributes = 2000 / n // the request has a limit
	}
	alike := g.attribute()
	for i := range n {
		d := resourceapi.Device{Name: fmt.Sprint("device-", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
		if g.seldom() {
			d.Name = fmt.Sprintf("%063d", i)
		}
		d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}
		for j := range attributes {
			switch j % 4 {
			case 0:
				d.Capacity[g.qualified(j)] = g.capacity(shared)
			case 1:
				d.Attributes[g.qualified(j)] = alike
			default:
				d.Attributes[g.qualified(j)] = g.attribute()
			}
		}
		if shared {
			d.AllowMultipleAllocations = ptr.To(true)
		}
		if tainted {
			for range g.upTo(resourceapi.DeviceTaintsMaxLength) {
				d.Taints = append(d.Taints, g.taint())
			}
		}
		if counted {
			for j := range resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice {
				d.ConsumesCounters = append(d.ConsumesCounters, resourceapi.DeviceCounterConsumption{
					CounterSet: fmt.Sprint("set-", (i+j)%resourceapi.ResourceSliceMaxCounterSets), Counters: g.counters(8, false),
				})
			}
		}
		if ptr.Deref(spec.PerDeviceNodeSelection, false) {
			switch {
			case g.often():
				d.NodeName = ptr.To(one(g, g.Nodes...))
			case g.often():
				d.AllNodes = ptr.To(true)
			default:
				d.NodeSelector = g.nodeSelector()
			}
		}
		if g.r.IntN(500) == 0 {
			d.BindingConditions, d.BindingFailureConditions = []string{"test.example/ready"}, []string{"test.example/failed"}
		}
		spec.Devices = append(spec.Devices, d)
	}
}

func (g *Generator) selectors(most int) []resourceapi.DeviceSelector {
	var all []resourceapi.DeviceSelector
	n := 0
	switch g.r.IntN(256) { // the API server compiles all of them, which took most of the time when there were four times as many
	case 0:
		n = g.upTo(most)
	case 1, 2, 3, 4, 5, 6, 7, 8:
		n = 1
	}
	for range n {
		text := one(g, g.expressions...)
		if g.seldom() {
			text += fmt.Sprintf(" || %d == 0", g.next()) // new to all caches
		}
		all = append(all, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: text}})
	}
	return all
}

// Class returns a class, which may stand for an extended resource.
func (g *Generator) Class() *resourceapi.DeviceClass {
	class := &resourceapi.DeviceClass{ObjectMeta: g.object("hostile-class")}
	class.Namespace = ""
	if len(class.Name) > 63 && g.often() {
		class.Name = name(fmt.Sprint("hostile-class-", g.next()), 63) // which a pod can ask for without a claim
	}
	class.Spec.Selectors = g.selectors(resourceapi.DeviceSelectorsMaxSize)
	if g.often() {
		extended := fmt.Sprintf("test.example/hostile-%d", g.next())
		class.Spec.ExtendedResourceName = &extended
		g.resources = append(g.resources, extended)
	}
	g.made = append(g.made, class.Name)
	return class
}

func (g *Generator) class() string {
	if g.r.IntN(64) == 0 {
		return "there-is-none"
	}
	return one(g, slices.Concat(g.Classes, g.made)...)
}

func (g *Generator) count() (resourceapi.DeviceAllocationMode, int64) {
	if g.seldom() {
		return resourceapi.DeviceAllocationModeAll, 0
	}
	return resourceapi.DeviceAllocationModeExactCount, one[int64](g, 1, 1, 1, 1, 1, 1, 1, 1, 2, 3, 8, 31, 32, 33, math.MaxInt64)
}

func (g *Generator) request(requestName string, few int) resourceapi.DeviceRequest {
	request := resourceapi.DeviceRequest{Name: requestName}
	mode, count := g.count()
	capacity := func() *resourceapi.CapacityRequirements {
		if g.often() {
			return nil
		}
		c := &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
		for i := range g.upTo(8) {
			c.Requests[g.qualified(4*i)] = g.quantity()
		}
		return c
	}
	tolerations := func() []resourceapi.DeviceToleration {
		var all []resourceapi.DeviceToleration
		for range g.r.IntN(2) * g.upTo(resourceapi.DeviceTolerationsMaxLength) {
			all = append(all, resourceapi.DeviceToleration{Operator: resourceapi.DeviceTolerationOpExists, Key: one(g, "", "k")})
		}
		return all
	}
	if g.often() {
		request.Exactly = &resourceapi.ExactDeviceRequest{
			DeviceClassName: g.class(), AllocationMode: mode, Count: count, Selectors: g.selectors(few), Capacity: capacity(),
			Tolerations: tolerations(),
		}
		if g.AdminAccess && g.seldom() {
			request.Exactly.AdminAccess, request.Exactly.Capacity = ptr.To(true), nil
		}
		return request
	}
	for i := range resourceapi.FirstAvailableDeviceRequestMaxSize {
		request.FirstAvailable = append(request.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: fmt.Sprint("s", i), DeviceClassName: g.class(), AllocationMode: mode, Count: count,
			Selectors: g.selectors(few), Capacity: capacity(),
			Tolerations: tolerations(),
		})
	}
	return request
}

// ClaimSpec returns what a claim or a template may ask for.
func (g *Generator) ClaimSpec() resourceapi.ResourceClaimSpec {
	g.wild = g.seldom()
	var spec resourceapi.ResourceClaimSpec
	n := one(g, 0, 1, 1, 2, 2, 4, 8, 16, 32)
	var names []string
	for i := range n {
		requestName := fmt.Sprint("r", i)
		if g.seldom() {
			requestName = fmt.Sprintf("r%062d", i)
		}
		names = append(names, requestName)
		spec.Devices.Requests = append(spec.Devices.Requests, g.request(requestName, max(1, resourceapi.DeviceSelectorsMaxSize/n)))
	}
	if n > 0 && !g.often() {
		for range g.upTo(resourceapi.DeviceConstraintsMaxSize) {
			attribute := resourceapi.FullyQualifiedName(g.driver() + "/a" + fmt.Sprint(one(g, 1, 5, 2, 3)))
			c := resourceapi.DeviceConstraint{MatchAttribute: &attribute}
			if g.seldom() {
				c = resourceapi.DeviceConstraint{DistinctAttribute: &attribute}
			}
			if g.often() {
				c.Requests = names[:1+g.r.IntN(n)]
			}
			spec.Devices.Constraints = append(spec.Devices.Constraints, c)
		}
	}
	if !g.often() {
		for range g.upTo(resourceapi.DeviceConfigMaxSize) {
			spec.Devices.Config = append(spec.Devices.Config,
				resourceapi.DeviceClaimConfiguration{DeviceConfiguration: resourceapi.DeviceConfiguration{
					Opaque: &resourceapi.OpaqueDeviceConfiguration{
						Driver: "hostile.test.example", Parameters: runtime.RawExtension{Raw: fmt.Appendf(nil, `{"x": "%0*d"}`, one(g, 1, 10_000), 0)},
					},
				}})
		}
	}
	return spec
}

// Claim returns a claim.
func (g *Generator) Claim() *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: g.object("claim"), Spec: g.ClaimSpec()}
}

// Template returns a template for claims.
func (g *Generator) Template() *resourceapi.ResourceClaimTemplate {
	template := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: g.object("template"),
		Spec:       resourceapi.ResourceClaimTemplateSpec{Spec: g.ClaimSpec()},
	}
	if g.seldom() {
		template.Spec.Annotations = map[string]string{"resource.kubernetes.io/pod-claim-name": "../../etc"}
	}
	return template
}

// Pod returns a pod that uses some of the claims and templates with the names, or extended resources of classes, or both.
func (g *Generator) Pod(claims, templates []string) *v1.Pod {
	pod := &v1.Pod{ObjectMeta: g.object("pod"), Spec: v1.PodSpec{
		SchedulerName: g.SchedulerName, NodeSelector: g.NodeSelector, TerminationGracePeriodSeconds: ptr.To[int64](0),
		AutomountServiceAccountToken: ptr.To(false),
		Containers:                   []v1.Container{{Name: "main", Image: "stowage.dev/probe:latest"}},
	}}
	if len(g.PriorityClasses) > 0 {
		pod.Spec.PriorityClassName = one(g, g.PriorityClasses...)
	}
	if g.seldom() {
		pod.Labels = map[string]string{"test.example/x": name("x", 63)[:63]}
	}
	main := &pod.Spec.Containers[0].Resources
	for i := range one(g, 0, 1, 1, 1, 2, 4, 32) {
		use := v1.PodResourceClaim{Name: fmt.Sprint("c", i)}
		if len(claims) > 0 && (len(templates) == 0 || g.often()) {
			use.ResourceClaimName = ptr.To(one(g, claims...))
		} else if len(templates) > 0 {
			use.ResourceClaimTemplateName = ptr.To(one(g, templates...))
		} else {
			break
		}
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, use)
		main.Claims = append(main.Claims, v1.ResourceClaim{Name: use.Name})
	}
	if len(g.resources)+len(g.made) > 0 && !g.often() {
		g.askExtended(pod)
	}
	return pod
}

// askExtended makes containers of a pod ask for extended resources.
func (g *Generator) askExtended(pod *v1.Pod) {
	ask := func(resources *v1.ResourceRequirements) {
		resources.Limits = v1.ResourceList{}
		for range g.upTo(8) {
			from := one(g, append(slices.Clip(g.resources), "deviceclass.resource.kubernetes.io/"+g.class())...)
			if len(from) > len("deviceclass.resource.kubernetes.io/")+63 {
				continue
			}
			resources.Limits[v1.ResourceName(from)] = *resource.NewQuantity(one[int64](g, 1, 1, 1, 2, 32, 33, math.MaxInt64), resource.DecimalSI)
		}
	}
	ask(&pod.Spec.Containers[0].Resources)
	for i := range one(g, 0, 1, 50) {
		c := v1.Container{Name: fmt.Sprint("init-", i), Image: "stowage.dev/probe:latest"}
		if g.seldom() {
			c.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		}
		ask(&c.Resources)
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
	}
}
