// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"path/filepath"
	"testing"

	topology "github.com/k8stopologyawareschedwg/noderesourcetopology-api/pkg/apis/topology/v1alpha2"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// numaConfig is the ready-made configuration with the plugin for NUMA nodes.
const numaConfig = manifests + "/scheduler-config/second-scheduler-numa.yaml"

// What the plugin says about a node on which a container does not fit into one NUMA node, and about one whose object it
// cannot cope with.
const (
	notAligned     = "cannot align container"
	brokenTopology = "the NodeResourceTopology object of the node makes no sense"
)

// installNUMA installs the API of NUMA nodes and the scheduler's right to read it, and returns a client for it.
func (w *world) installNUMA() client.Client {
	w.t.Helper()
	w.must(cluster.Apply(w.ctx, filepath.Join(manifests, "numa")), "installing the API of NUMA nodes")
	_, err := cluster.Kubectl(w.ctx, "wait", "--for=condition=Established", "--timeout=60s", "crd/noderesourcetopologies.topology.node.k8s.io")
	w.must(err, "waiting for the API of NUMA nodes")
	scheme := runtime.NewScheme()
	w.must(topology.AddToScheme(scheme), "knowing the API of NUMA nodes")
	c, err := client.New(cluster.AdminConfig(), client.Options{Scheme: scheme})
	w.must(err, "connecting to the API of NUMA nodes")
	return c
}

// numaNode is a NUMA node with so many CPUs left, of 64, and enough memory.
func numaNode(name, cpus string) topology.Zone {
	of := func(name, capacity, available string) topology.ResourceInfo {
		return topology.ResourceInfo{
			Name: name, Capacity: resource.MustParse(capacity), Allocatable: resource.MustParse(capacity), Available: resource.MustParse(available),
		}
	}
	return topology.Zone{Name: name, Type: "Node", Resources: topology.ResourceInfoList{of("cpu", "64", cpus), of("memory", "512Gi", "512Gi")}}
}

// numaNodes are the NUMA nodes 0 and 1 with so many CPUs left.
func numaNodes(cpus0, cpus1 string) []topology.Zone {
	return []topology.Zone{numaNode("node-0", cpus0), numaNode("node-1", cpus1)}
}

// publishTopology publishes what the NUMA nodes of a node have, as an exporter on the node does.
func (w *world) publishTopology(c client.Client, nodeSuffix, policy string, zones []topology.Zone) *topology.NodeResourceTopology {
	w.t.Helper()
	object := &topology.NodeResourceTopology{
		ObjectMeta: metav1.ObjectMeta{Name: w.nodeName(nodeSuffix)},
		Attributes: topology.AttributeList{{Name: "topologyManagerPolicy", Value: policy}, {Name: "topologyManagerScope", Value: "container"}},
		Zones:      zones,
	}
	w.must(c.Create(w.ctx, object), "publishing the topology of node %s", object.Name)
	w.t.Cleanup(func() { _ = c.Delete(w.ctx, object) })
	return object
}

// guaranteed makes the pod's container ask for exactly so much CPU and memory.
func guaranteed(cpus, memory string) podOption {
	return func(p *v1.Pod) {
		resources := &p.Spec.Containers[0].Resources
		if resources.Limits == nil {
			resources.Limits = v1.ResourceList{}
		}
		resources.Limits[v1.ResourceCPU], resources.Limits[v1.ResourceMemory] = resource.MustParse(cpus), resource.MustParse(memory)
	}
}

// devicesDecide makes how much of a node's devices is in use outweigh all that other plugins prefer.
func devicesDecide(config *schedulerconfig.KubeSchedulerConfiguration) {
	for i := range config.Profiles {
		enabled := config.Profiles[i].Plugins.MultiPoint.Enabled
		for j := range enabled {
			if enabled[j].Name == deviceclaims.Name {
				enabled[j].Weight = 1000
			}
		}
	}
}

// A pod with a GPU and CPUs goes where one NUMA node has the CPUs, if the kubelet insists on one. All else speaks for node
// "busy", where a GPU is held already.
func TestPodGoesWhereOneNUMANodeHasItsCPUs(t *testing.T) {
	t.Parallel()
	const single = "single-numa-node"
	installed := newWorld(t).installNUMA()
	scheduler := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{config: numaConfig, edit: devicesDecide})
	tests := map[string]struct {
		// topologies by node; a node without one has no object.
		topologies map[string][]topology.Zone
		policy     string
		wants      func(w *world) []podOption
		// on is the node that the pod gets, or none, with the reasons.
		on      string
		reasons []string
	}{
		"the only node where it fits": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("20", "20"), "idle": numaNodes("8", "32")},
			on:         "idle",
		},
		"fits on both": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("8", "32"), "idle": numaNodes("8", "32")},
			on:         "busy",
		},
		"fits nowhere": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("20", "20"), "idle": numaNodes("20", "20")},
			reasons:    []string{"2 " + notAligned},
		},
		"fits where there are too few GPUs": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("32", "32"), "idle": numaNodes("20", "20")},
			wants: func(w *world) []podOption {
				w.addClaim("wanted", spec(w.exactly("gpu", 2)))
				return []podOption{withClaim("wanted"), guaranteed("32", "1Gi")}
			},
			reasons: []string{"1 " + notAligned, "1 node(s) whose matching devices are held by other claims"},
		},
		"the kubelet does not insist": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("20", "20"), "idle": numaNodes("8", "32")},
			policy:     "best-effort",
			on:         "busy",
		},
		"a node that says nothing": {
			topologies: map[string][]topology.Zone{"idle": numaNodes("8", "32")},
			on:         "busy",
		},
		"CPUs are not for the pod alone": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("20", "20"), "idle": numaNodes("8", "32")},
			wants: func(w *world) []podOption {
				w.addClaim("wanted", spec(w.exactly("gpu", 1)))
				return []podOption{withClaim("wanted"), withCPUs("32")}
			},
			on: "busy",
		},
		"GPUs as an extended resource that nodes give to claims": {
			topologies: map[string][]topology.Zone{"busy": numaNodes("20", "20"), "idle": numaNodes("8", "32")},
			wants: func(w *world) []podOption {
				return []podOption{asks(w.standsFor(w.class, "gpu"), "main=1"), guaranteed("32", "1Gi")}
			},
			on: "idle",
		},
		"a node whose topology is out of bounds": {
			topologies: map[string][]topology.Zone{"busy": {numaNode("node-64", "64")}, "idle": numaNodes("8", "32")},
			on:         "idle",
		},
		"no other node than one whose topology is out of bounds": {
			topologies: map[string][]topology.Zone{"busy": {numaNode("node-64", "64")}, "idle": {numaNode("node-64", "64")}},
			reasons:    []string{"2 " + brokenTopology},
		},
		"numbers of NUMA nodes with a gap": {
			topologies: map[string][]topology.Zone{"busy": {numaNode("node-3", "64")}, "idle": {numaNode("node-3", "64")}},
			on:         "busy",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, scheduler)
			w.addNode("busy", gpus(h100, 2)...)
			w.addNode("idle", gpus(h100, 2)...)
			w.addTemplate("one", spec(w.exactly("gpu", 1)))
			w.addPod("holder", withTemplate("one"), w.onNode("busy"))
			w.awaitBound("holder")
			if tc.policy == "" {
				tc.policy = single
			}
			for node, zones := range tc.topologies {
				w.publishTopology(installed, node, tc.policy, zones)
			}
			options := []podOption{withTemplate("one"), guaranteed("32", "1Gi")}
			if tc.wants != nil {
				options = tc.wants(w)
			}
			w.addPod("pod", options...)
			if tc.on == "" {
				w.awaitUnschedulable("pod", tc.reasons...)
				return
			}
			w.awaitBoundTo("pod", tc.on)
		})
	}
}

// A pod that no NUMA node has room for runs when one has, without any other event, and gets its GPU there.
func TestPodWaitsForANUMANode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	c := w.installNUMA()
	w.addNode("a", gpus(h100, 1)...)
	object := w.publishTopology(c, "a", "single-numa-node", numaNodes("20", "20"))
	s := startScheduler(t, w.name, schedulerSetup{config: numaConfig})
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPriorities()
	w.run("other", low, "a")
	w.addPod("pod", withClaim("wanted"), guaranteed("32", "1Gi"), w.withPriority(high))
	w.awaitUnschedulable("pod", "1 "+notAligned)
	if n := s.probe.of("pod").taken; n != 0 {
		t.Errorf("preemption tried the node, which cannot help: %d pods were taken off it", n)
	}
	if got := devices(w.claim("wanted")); len(got) > 0 {
		t.Errorf("the pod waits with devices %q", got)
	}
	object.Zones = numaNodes("20", "32")
	w.must(c.Update(w.ctx, object), "publishing what has become free on node a")
	w.awaitBoundTo("pod", "a")
	if got := devices(w.claim("wanted")); len(got) != 1 {
		t.Errorf("the pod has devices %q", got)
	}
}
