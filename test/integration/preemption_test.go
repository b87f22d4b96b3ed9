// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// Priorities of pods.
const (
	low    = "low"
	middle = "middle"
	high   = "high"
)

// addPriorities makes the world's priority classes.
func (w *world) addPriorities() {
	w.t.Helper()
	for i, name := range []string{low, middle, high} {
		class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: w.name + "-" + name}, Value: int32(i+1) * 1000}
		_, err := w.client.SchedulingV1().PriorityClasses().Create(w.ctx, class, metav1.CreateOptions{})
		w.must(err, "creating priority class %s", class.Name)
		w.t.Cleanup(func() { w.cleanUp(w.client.SchedulingV1().PriorityClasses().Delete, class.Name) })
	}
}

func (w *world) withPriority(priority string) podOption {
	return func(p *v1.Pod) { p.Spec.PriorityClassName = w.name + "-" + priority }
}

// withTemplateAs makes the pod use one more claim from a template.
func withTemplateAs(name, template string) podOption {
	return func(p *v1.Pod) {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: name, ResourceClaimTemplateName: &template})
	}
}

func withLabel(key, value string) podOption {
	return func(p *v1.Pod) { p.Labels = map[string]string{key: value} }
}

// run adds a pod and waits until it has the node.
func (w *world) run(name, priority, nodeSuffix string, options ...podOption) {
	w.t.Helper()
	w.addPod(name, append(options, w.withPriority(priority), w.onNode(nodeSuffix))...)
	w.awaitBoundTo(name, nodeSuffix)
}

// addCountedNode makes a node with devices that share nothing but the counter "memory", of which there are 80Gi.
func (w *world) addCountedNode(suffix string) {
	w.t.Helper()
	w.addNode(suffix)
	devices, counters := w.slice(suffix), w.slice(suffix)
	counters.Name += "-counters"
	for _, slice := range []*resourceapi.ResourceSlice{devices, counters} {
		slice.Spec.Pool.ResourceSliceCount = 2
	}
	device := func(name, kind, memory string) resourceapi.Device {
		return resourceapi.Device{
			Name: name, Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": text(kind)},
			ConsumesCounters: []resourceapi.DeviceCounterConsumption{{CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(memory)}}}},
		}
	}
	devices.Spec.Devices = []resourceapi.Device{
		device("small-0", "small", "20Gi"), device("small-1", "small", "20Gi"), device("small-2", "small", "20Gi"), device("big", "big", "60Gi"),
	}
	counters.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "gpu", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}}}}
	w.addSlice(devices)
	w.addSlice(counters)
}

// Victims are as few and of as low a priority as the devices allow, and the pod gets their devices.
func TestPreemption(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	tests := map[string]struct {
		// setUp makes nodes and pods that run.
		setUp func(w *world)
		// wants are the options of the preemptor.
		wants []podOption
		// extended is how much it asks for of the extended resource that the world's class stands for.
		extended string
		// victims must go, all other pods stay. Without victims nothing happens, and the preemptor does not run.
		victims []string
	}{
		"whole GPUs: of two nodes the one with the lower priority": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.addNode("b", gpus(h100, 1)...)
				w.run("keep", middle, "a", withTemplate("one"))
				w.run("go", low, "b", withTemplate("one"))
			},
			wants: []podOption{withTemplate("one")}, victims: []string{"go"},
		},
		"whole GPUs: no more than are needed beside a free one": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 3)...)
				w.run("keep", middle, "a", withTemplate("one"))
				w.run("go", low, "a", withTemplate("one"))
			},
			wants: []podOption{withTemplate("two")}, victims: []string{"go"},
		},
		"partitions: those that are in the way of the wanted one": {
			setUp: func(w *world) {
				w.addPartitionedNode("a", "gpu-0")
				w.addTemplate("quarter", w.partition("quarter"))
				w.addTemplate("half", w.partition("half"))
				w.run("keep-0", middle, "a", withTemplate("quarter"))
				w.run("keep-1", middle, "a", withTemplate("quarter"))
				w.run("go-2", low, "a", withTemplate("quarter"))
				w.run("go-3", low, "a", withTemplate("quarter"))
			},
			wants: []podOption{withTemplate("half")}, victims: []string{"go-2", "go-3"},
		},
		"shared counters: until enough is left": {
			setUp: func(w *world) {
				w.addCountedNode("a")
				w.addTemplate("small", w.partition("small"))
				w.addTemplate("big", w.partition("big"))
				w.run("go-0", low, "a", withTemplate("small"))
				w.run("keep", middle, "a", withTemplate("small"))
				w.run("go-1", low, "a", withTemplate("small"))
			},
			wants: []podOption{withTemplate("big")}, victims: []string{"go-0", "go-1"},
		},
		"shares of capacity": {
			setUp: func(w *world) {
				w.addNode("a", divisible("gpu-0", "40Gi"))
				w.addTemplate("share-15", spec(w.share("gpu", map[resourceapi.QualifiedName]string{"memory": "15Gi"})))
				w.addTemplate("share-20", spec(w.share("gpu", map[resourceapi.QualifiedName]string{"memory": "20Gi"})))
				w.run("keep", middle, "a", withTemplate("share-15"))
				w.run("go", low, "a", withTemplate("share-20"))
			},
			wants: []podOption{withTemplate("share-20")}, victims: []string{"go"},
		},
		"two claims per pod": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 4)...)
				w.run("keep", middle, "a", withTemplateAs("x", "one"), withTemplateAs("y", "one"))
				w.run("go", low, "a", withTemplateAs("x", "one"), withTemplateAs("y", "one"))
			},
			wants: []podOption{withTemplateAs("x", "one"), withTemplateAs("y", "one")}, victims: []string{"go"},
		},
		"a claim that a survivor shares is not freed": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.addNode("b", gpus(h100, 1)...)
				w.addClaim("common", spec(w.exactly("gpu", 1)))
				w.run("stay-low", low, "a", withClaim("common"))
				w.run("survivor", high, "a", withClaim("common"))
				w.run("go", middle, "b", withTemplate("one"))
			},
			wants: []podOption{withTemplate("one")}, victims: []string{"go"},
		},
		"a claim that two pods share goes with both": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 2)...)
				w.addClaim("common", spec(w.exactly("gpu", 1)))
				w.run("go-0", low, "a", withClaim("common"))
				w.run("go-1", low, "a", withClaim("common"))
				w.run("keep", middle, "a", withTemplate("one"))
			},
			wants: []podOption{withTemplate("one")}, victims: []string{"go-0", "go-1"},
		},
		"a pod that a disruption budget protects": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 2)...)
				w.run("protected", low, "a", withTemplate("one"), withLabel("app", "protected"))
				w.run("go", middle, "a", withTemplate("one"))
				_, err := w.client.PolicyV1().PodDisruptionBudgets(w.name).Create(w.ctx, &policyv1.PodDisruptionBudget{
					ObjectMeta: metav1.ObjectMeta{Name: "budget"},
					Spec: policyv1.PodDisruptionBudgetSpec{
						MinAvailable: ptr.To(intstr.FromInt32(1)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "protected"}},
					},
				}, metav1.CreateOptions{})
				w.must(err, "creating a disruption budget")
				w.awaitBudget(s, "budget")
			},
			wants: []podOption{withTemplate("one")}, victims: []string{"go"},
		},
		"extended resources: a pod with a claim evicts one of them": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 2)...)
				w.run("keep", middle, "a", asks(w.standsFor(w.class, "gpu"), "main=1"))
				w.run("go", low, "a", asks(w.driver+"/gpu", "main=1"))
			},
			wants: []podOption{withTemplate("one")}, victims: []string{"go"},
		},
		"extended resources: of a pod that evicts one with a claim": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 2)...)
				w.standsFor(w.class, "gpu")
				w.run("keep", middle, "a", withTemplate("one"))
				w.run("go", low, "a", withTemplate("one"))
			},
			extended: "main=1", victims: []string{"go"},
		},
		"equal priority": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.run("keep", high, "a", withTemplate("one"))
			},
			wants: []podOption{withTemplate("one")},
		},
		"a lower priority that has too little": {
			setUp: func(w *world) {
				w.addNode("a", gpus(h100, 2)...)
				w.run("keep-0", high, "a", withTemplate("one"))
				w.run("keep-1", low, "a", withTemplate("one"))
			},
			wants: []podOption{withTemplate("two")},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			w.addPriorities()
			w.addTemplate("one", spec(w.exactly("gpu", 1)))
			w.addTemplate("two", spec(w.exactly("gpu", 2)))
			tc.setUp(w)
			before := w.podNames()
			wants := append(tc.wants, w.withPriority(high))
			if tc.extended != "" {
				wants = append(wants, asks(w.driver+"/gpu", tc.extended))
			}
			preemptor := w.addPod("preemptor", wants...)
			if len(tc.victims) == 0 {
				w.awaitEvent(preemptor, "held")
				message := scheduledCondition(w.awaitUnschedulable("preemptor", "held")).Message
				if strings.Contains(message, "preemption:") {
					t.Errorf("the pod is told of preemption, though nobody could be evicted: %s", message)
				}
			} else {
				pod := w.awaitBound("preemptor")
				if tc.extended != "" {
					w.extendedClaim(pod)
				}
			}
			want := slices.DeleteFunc(append(before, "preemptor"), func(name string) bool { return slices.Contains(tc.victims, name) })
			slices.Sort(want)
			if diff := cmp.Diff(want, w.podNames()); diff != "" {
				t.Errorf("pods that are left (-want +got):\n%s", diff)
			}
		})
	}
}

// podNames are the pods that exist, in order.
func (w *world) podNames() []string {
	w.t.Helper()
	list, err := w.client.CoreV1().Pods(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing pods")
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	slices.Sort(names)
	return names
}

// awaitBudget waits until the scheduler knows the disruption budget.
func (w *world) awaitBudget(s *scheduler, name string) {
	w.t.Helper()
	lister := s.probe.handle.SharedInformerFactory().Policy().V1().PodDisruptionBudgets().Lister()
	w.eventually("the scheduler knows the disruption budget", func() bool {
		_, err := lister.PodDisruptionBudgets(w.name).Get(name)
		return err == nil
	})
}

// Preemption tries no node on which evictions could make room for the pod and not give it devices, nor one that the pod cannot use anyway.
func TestPreemptionTriesNoNodeInVain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addPriorities()
	w.addTemplate("gpu", spec(w.exactly("gpu", 1)))
	s := startScheduler(t, w.name, schedulerSetup{})
	// On one node pods of low priority have all CPUs and one of high priority has the GPU; on the other one a pod of low priority has it.
	w.addNode("full", gpus(h100, 1)...)
	w.addNode("forbidden", gpus(h100, 1)...)
	w.run("important", high, "full", withTemplate("gpu"))
	w.run("busy", low, "full", withCPUs("128"))
	w.run("holder", low, "forbidden", withTemplate("gpu"))

	w.addPod("pod", w.withPriority(middle), withTemplate("gpu"), withCPUs("64"), func(p *v1.Pod) {
		p.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
			NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{
				Key: v1.LabelHostname, Operator: v1.NodeSelectorOpNotIn, Values: []string{w.nodeName("forbidden")},
			}}}},
		}}}
	})
	w.awaitUnschedulable("pod", "1 of 1", "held")
	if n := s.probe.of("pod").taken; n != 0 {
		t.Errorf("preemption tried nodes, %d pods were taken off them", n)
	}
	if names := w.podNames(); len(names) != 4 {
		t.Errorf("pods left: %v, want all", names)
	}
}

// A pod is not told of preemption that finds nobody, whatever it has tried, neither by its event nor by its condition.
func TestAPodIsNotToldOfPreemptionThatFindsNobody(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		holder string // the priority of the pod that has the other device
		tried  bool
	}{
		"a pod of lower priority that has too few CPUs": {holder: low, tried: true},
		"pods of higher priority have all":              {holder: high},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			s := startScheduler(t, w.name, schedulerSetup{}) // of its own, because its probe counts by the pod's name
			w.addPriorities()
			w.addTemplate("one", spec(w.exactly("gpu", 1)))
			w.addNode("a", gpus(h100, 2)...)
			w.run("holder", tc.holder, "a", withTemplate("one"), withCPUs("1"))
			w.run("busy", high, "a", withCPUs("100"))
			before := w.podNames()
			pod := w.addPod("pod", withTemplate("one"), withCPUs("64"), w.withPriority(middle))
			w.awaitEvent(pod, "Insufficient cpu")
			if message := scheduledCondition(w.awaitUnschedulable("pod", "Insufficient cpu")).Message; strings.Contains(message, "reemption") {
				t.Errorf("the condition: %s", message)
			}
			list, err := w.client.CoreV1().Events(w.name).List(w.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=pod"})
			w.must(err, "listing the pod's events")
			for i := range list.Items {
				if message := list.Items[i].Message; strings.Contains(message, "reemption") {
					t.Errorf("an event: %s", message)
				}
			}
			if tried := s.probe.of("pod").taken > 0; len(list.Items) == 0 || tried != tc.tried {
				t.Errorf("%d events, preemption tried nodes: %t; the test shows nothing", len(list.Items), tried)
			}
			if diff := cmp.Diff(append(before, "pod"), w.podNames()); diff != "" {
				t.Errorf("pods that are left (-want +got):\n%s", diff)
			}
		})
	}
}
