// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	policyapi "k8s.io/api/policy/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// A drain evicts what the eviction API would let it, and says why a pod stays.
func TestADrainRespectsBudgets(t *testing.T) {
	budget := func(name string, labels map[string]string, allowed int32) *policyapi.PodDisruptionBudget {
		return &policyapi.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name},
			Spec:       policyapi.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}},
			Status:     policyapi.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, CurrentHealthy: 2, DesiredHealthy: 2},
		}
	}
	web := map[string]string{"app": "web"}
	for name, tc := range map[string]struct {
		change  func(*policyapi.PodDisruptionBudget, []*v1.Pod) []*policyapi.PodDisruptionBudget
		evicted string
		kept    string
	}{
		"none": {func(*policyapi.PodDisruptionBudget, []*v1.Pod) []*policyapi.PodDisruptionBudget { return nil }, "a/one a/two", ""},
		"of other pods": {func(b *policyapi.PodDisruptionBudget, _ []*v1.Pod) []*policyapi.PodDisruptionBudget {
			b.Spec.Selector.MatchLabels = map[string]string{"app": "db"}
			return one(b)
		}, "a/one a/two", ""},
		"of another namespace": {func(b *policyapi.PodDisruptionBudget, _ []*v1.Pod) []*policyapi.PodDisruptionBudget {
			b.Namespace = "b"
			return one(b)
		}, "a/one a/two", ""},
		"one disruption": {func(b *policyapi.PodDisruptionBudget, _ []*v1.Pod) []*policyapi.PodDisruptionBudget {
			b.Status.DisruptionsAllowed = 1
			return one(b)
		}, "a/one", "a/two: disruption budget a/web allows 1 disruptions now"},
		"no disruption": {func(b *policyapi.PodDisruptionBudget, _ []*v1.Pod) []*policyapi.PodDisruptionBudget { return one(b) }, "", "a/one: disruption budget a/web allows 0 disruptions now, a/two: disruption budget a/web allows 0 disruptions now"},
		"two budgets": {func(b *policyapi.PodDisruptionBudget, _ []*v1.Pod) []*policyapi.PodDisruptionBudget {
			return append(one(b), budget("all", nil, 9))
		}, "", "a/one: it has 2 disruption budgets, which the eviction API does not support, a/two: it has 2 disruption budgets, which the eviction API does not support"},
		"a pod that is not well": {func(b *policyapi.PodDisruptionBudget, pods []*v1.Pod) []*policyapi.PodDisruptionBudget {
			pods[0].Status.Conditions = nil
			return one(b)
		}, "a/one", "a/two: disruption budget a/web allows 0 disruptions now"},
		"not well, and too few": {func(b *policyapi.PodDisruptionBudget, pods []*v1.Pod) []*policyapi.PodDisruptionBudget {
			pods[0].Status.Conditions = nil
			b.Status.CurrentHealthy = 1
			return one(b)
		}, "", "a/one: disruption budget a/web allows 0 disruptions now, a/two: disruption budget a/web allows 0 disruptions now"},
		"not well, always": {func(b *policyapi.PodDisruptionBudget, pods []*v1.Pod) []*policyapi.PodDisruptionBudget {
			pods[0].Status.Conditions = nil
			b.Status.CurrentHealthy, b.Spec.UnhealthyPodEvictionPolicy = 1, ptr.To(policyapi.AlwaysAllow)
			return one(b)
		}, "a/one", "a/two: disruption budget a/web allows 0 disruptions now"},
		"changed just now": {func(b *policyapi.PodDisruptionBudget, _ []*v1.Pod) []*policyapi.PodDisruptionBudget {
			b.Generation, b.Status.DisruptionsAllowed = 2, 5
			return one(b)
		}, "", "a/one: disruption budget a/web has just been changed, a/two: disruption budget a/web has just been changed"},
	} {
		t.Run(name, func(t *testing.T) {
			c := snapshottest.New(2, 2)
			var pods []*v1.Pod
			for i, name := range []string{"one", "two"} {
				pod, _ := c.Run("a", name, 0, 0, i)
				pod.Labels = web
				pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}
				pods = append(pods, pod)
			}
			c.PodDisruptionBudgets = tc.change(budget("web", web, 0), pods)
			change := simulate.NewChange(&c.Objects)
			if _, err := change.Drain("worker-0"); err != nil {
				t.Fatal(err)
			}
			var kept []string
			for _, k := range change.Kept {
				kept = append(kept, k.Pod+": "+k.Reason)
			}
			if diff := cmp.Diff([]string{tc.evicted, tc.kept}, []string{strings.Join(change.Evicted, " "), strings.Join(kept, ", ")}); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func one(b *policyapi.PodDisruptionBudget) []*policyapi.PodDisruptionBudget {
	return []*policyapi.PodDisruptionBudget{b}
}

// A Job has no more pods at once than it is to complete, and none while it is suspended.
func TestPodsOfJobs(t *testing.T) {
	for name, tc := range map[string]struct {
		spec string
		want int
	}{
		"neither":               {"", 1},
		"parallelism":           {"parallelism: 3", 3},
		"fewer completions":     {"parallelism: 3\n  completions: 2", 2},
		"more completions":      {"parallelism: 3\n  completions: 7", 3},
		"completions alone":     {"completions: 7", 1},
		"suspended":             {"parallelism: 3\n  suspend: true", 0},
		"nothing to be at once": {"parallelism: 0\n  completions: 2", 0},
	} {
		job := "apiVersion: batch/v1\nkind: Job\nmetadata: {name: train}\nspec:\n  " + tc.spec +
			"\n  template: {spec: {restartPolicy: Never, containers: [{name: main, image: x}]}}\n"
		c := snapshottest.New(1, 1)
		pods, err := simulate.NewChange(&c.Objects).Apply(strings.NewReader(job), "a")
		if err != nil || len(pods) != tc.want {
			t.Errorf("%s: %d pods, %v, want %d", name, len(pods), err, tc.want)
		}
	}
}

// What was placed before an eviction keeps its devices after it, although others are free then: each device is told once.
func TestDevicesStayOverAnEviction(t *testing.T) {
	for seed := range uint64(8) {
		c := snapshottest.New(1, 4)
		c.Run("a", "victim", 0, 0, 0, 1)
		first, _ := c.Pod("a", "first", 1, 200)
		second, _ := c.Pod("a", "second", 2, 100)
		third, _ := c.Pod("a", "third", 1, 50)
		change := simulate.NewChange(&c.Objects)
		outcomes, err := simulate.Place(t.Context(), change, []*v1.Pod{first, second, third}, simulate.Options{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		holds := map[string]string{}
		for _, out := range outcomes {
			for _, d := range out.Devices {
				if other := holds[d.Device]; other != "" {
					t.Errorf("seed %d: %s and %s are told of %s", seed, other, out.Pod, d.Device)
				}
				holds[d.Device] = out.Pod
			}
		}
		if len(holds) != 4 || len(change.Evicted) != 1 {
			t.Errorf("seed %d: %v, evicted %v", seed, holds, change.Evicted)
		}
	}
}

// A pod that is refused before any node is looked at is told by whom, and nothing of devices.
func TestRefusedBeforeAnyNode(t *testing.T) {
	for name, change := range map[string]func(*snapshottest.Cluster, *v1.Pod){
		"no class": func(c *snapshottest.Cluster, _ *v1.Pod) { c.DeviceClasses = nil },
		"no claim": func(c *snapshottest.Cluster, _ *v1.Pod) { c.ResourceClaims = nil },
	} {
		c := snapshottest.New(1, 4)
		pod, _ := c.Pod("a", "one", 1, 0)
		change(c, pod)
		why, err := simulate.Explain(t.Context(), &c.Objects, "a", "one", simulate.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if out := why.Outcome; out.RefusedBy != "DeviceClaims" || out.Explanation != nil || out.Reason == "" {
			t.Errorf("%s: refused by %q, %q, %+v", name, out.RefusedBy, out.Reason, out.Explanation)
		}
	}
}

// Pods that no controller makes again are told of: a drain takes them away for good.
func TestADrainTellsWhatIsLost(t *testing.T) {
	c := snapshottest.New(2, 2)
	c.Run("a", "bare", 0, 0, 0)
	controlled, _ := c.Run("a", "controlled", 0, 0, 1)
	controlled.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "r", UID: "r", Controller: ptr.To(true)}}
	change := simulate.NewChange(&c.Objects)
	back, err := change.Drain("worker-0")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a/bare"}, change.Lost); diff != "" {
		t.Error(diff)
	}
	if len(back) != 1 || back[0].Name != "controlled" {
		t.Errorf("%d pods come back", len(back))
	}
}

// Of a claim that has not been made it is told if its template is missing.
func TestAMissingTemplateIsNamed(t *testing.T) {
	for there, want := range map[bool]string{true: `pod "a/one": ResourceClaim not created yet`, false: "there is no ResourceClaimTemplate gpus"} {
		c := snapshottest.New(1, 1)
		pod, _ := c.Pod("a", "one", 1, 0)
		pod.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("gpus")}}
		c.ResourceClaims = nil
		if there {
			c.ResourceClaimTemplates = []*resourceapi.ResourceClaimTemplate{{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "gpus"}}}
		}
		why, err := simulate.Explain(t.Context(), &c.Objects, "a", "one", simulate.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if got := why.Claims[0].Missing; got != want {
			t.Errorf("template there: %v: %s, want %s", there, got, want)
		}
	}
}
