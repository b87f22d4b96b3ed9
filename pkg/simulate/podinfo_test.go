// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// requesting is a pod of 2 CPUs.
func requesting(conditions ...v1.PodCondition) *v1.Pod {
	return &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Resources: v1.ResourceRequirements{
		Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("2")},
	}}}}, Status: v1.PodStatus{Conditions: conditions}}
}

// The sums of a pod are those that the framework finds, whatever pod came first: also if one is being resized.
func TestPodsThatRequestTheSameHaveTheSums(t *testing.T) {
	r := rand.New(rand.NewPCG(rand.Uint64(), 0))
	list := func() v1.ResourceList {
		l := v1.ResourceList{}
		for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory, "nvidia.com/gpu"} {
			if r.IntN(2) == 0 {
				l[name] = resource.MustParse([]string{"0", "1", "2", "1.0", "1000m"}[r.IntN(5)])
			}
		}
		return l
	}
	alike := podInfos{}
	for range 5000 {
		pod := &v1.Pod{}
		for range r.IntN(3) {
			c := v1.Container{Name: string(rune('a' + r.IntN(3))), Resources: v1.ResourceRequirements{Requests: list(), Limits: list()}}
			if r.IntN(2) == 0 {
				policy := []v1.ContainerRestartPolicy{"Always", "Never"}[r.IntN(2)]
				c.RestartPolicy = &policy
			}
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
		}
		for range r.IntN(3) {
			pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Name: string(rune('a' + r.IntN(3))), Resources: v1.ResourceRequirements{Requests: list()}})
		}
		switch r.IntN(9) {
		case 0:
			pod.Spec.Overhead = list()
		case 1:
			pod.Spec.Resources = &v1.ResourceRequirements{Requests: list(), Limits: list()}
		case 2:
			pod.Status.AllocatedResources = list()
		case 3:
			pod.Status.Resources = &v1.ResourceRequirements{Requests: list()}
		case 4:
			pod.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "a", AllocatedResources: list()}}
		case 5:
			pod.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "b", Resources: &v1.ResourceRequirements{Requests: list()}}}
		case 6:
			pod.Status.Phase = v1.PodRunning
		case 7:
			pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodResizePending, Reason: v1.PodReasonInfeasible}}
		}
		info := alike.of(pod)
		fresh, _ := framework.NewPodInfo(pod)
		if diff := cmp.Diff(fresh.CalculateResource(), info.CalculateResource()); diff != "" {
			t.Fatalf("%+v: %s", pod, diff)
		}
	}
}

// kube-scheduler passes over an affinity of a running pod that cannot be parsed, as the API server takes some.
func TestAnAffinityThatCannotBeReadIsPassedOver(t *testing.T) {
	c := snapshottest.New(2, 2)
	c.Run("team-a", "train", 0, 0, 1)
	c.Pod("team-b", "late", 1, 5)
	for _, pod := range c.Pods {
		if pod.Spec.NodeName != "" {
			pod.Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{
				TopologyKey: v1.LabelHostname, LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "not valid!"}},
			}}}}
		}
	}
	if _, err := Explain(t.Context(), &c.Objects, "team-b", "late", Options{}); err != nil {
		t.Errorf("one running pod: %v", err)
	}
}

// Three pods of 2 CPUs run on a node of 7, and one of them was asked to grow, which is infeasible. 5 CPUs are not free.
func TestAPodWhoseResizeIsInfeasibleCountsAlone(t *testing.T) {
	for _, condition := range []bool{false, true} {
		c := snapshottest.New(1, 2)
		c.Nodes[0].Status.Allocatable[v1.ResourceCPU] = resource.MustParse("7")
		for i := range 3 {
			pod := requesting()
			if i == 0 && condition {
				pod = requesting(v1.PodCondition{Type: v1.PodResizePending, Status: v1.ConditionTrue, Reason: v1.PodReasonInfeasible})
			}
			pod.Namespace, pod.Name = "team-a", "cpu-"+string(rune('0'+i))
			pod.UID, pod.Spec.NodeName, pod.Status.Phase = "uid-"+types.UID(pod.Name), c.Nodes[0].Name, v1.PodRunning
			c.Pods = append(c.Pods, pod)
		}
		late, _ := c.Pod("team-b", "late", 1, 0)
		late.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse("5")}
		why, err := Explain(t.Context(), &c.Objects, "team-b", "late", Options{})
		if err != nil {
			t.Fatal(err)
		}
		if why.Outcome.Node != "" {
			t.Errorf("a pod of 5 CPUs is placed where at least two pods of 2 run on 7")
		}
	}
}
