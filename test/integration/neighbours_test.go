// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/internal/localcluster"
)

// The second-scheduler configuration beside the real kube-scheduler: each schedules its own pods and leaves
// the other's alone, and both leave those of a third.
func TestSecondSchedulerBesideTheStockOne(t *testing.T) {
	t.Parallel()
	reserveSharedProfiles(t)
	w := newWorld(t)
	stock, err := cluster.StartStockScheduler(w.ctx, localcluster.SchedulerOptions{})
	w.must(err, "starting the stock scheduler")
	stopAtEnd(t, stock)
	startProcess(t, localcluster.SchedulerOptions{Config: secondScheduler})

	w.addNode("a", gpus(h100, 4)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addPod("nobodys", withTemplate("one"), withScheduler("nobody"))
	for i := range 2 {
		w.addPod(fmt.Sprintf("ours-%d", i), withTemplate("one"), withScheduler("stowage"))
		w.addPod(fmt.Sprintf("ours-plain-%d", i), withScheduler("stowage"))
		w.addPod(fmt.Sprintf("stock-plain-%d", i), withScheduler(v1.DefaultSchedulerName))
	}
	for i := range 2 {
		w.awaitScheduledBy(fmt.Sprintf("ours-%d", i), "stowage")
		w.awaitScheduledBy(fmt.Sprintf("ours-plain-%d", i), "stowage")
		w.awaitScheduledBy(fmt.Sprintf("stock-plain-%d", i), v1.DefaultSchedulerName)
	}
	// The stock scheduler counts the devices that ours has given away.
	w.addTemplate("rest", spec(w.exactly("gpus", 2)))
	w.addPod("stock", withTemplate("rest"), withScheduler(v1.DefaultSchedulerName))
	pod := w.awaitScheduledBy("stock", v1.DefaultSchedulerName)
	if got := devices(w.claim(claimName(pod, "rest"))); len(got) != 2 {
		t.Errorf("the stock scheduler's pod has the devices %q, want the remaining two", got)
	}
	// And ours those of the stock one.
	w.addPod("late", withTemplate("one"), withScheduler("stowage"))
	w.awaitUnschedulable("late")

	nobodys := w.awaitPod("nobodys", "there", func(*v1.Pod) bool { return true })
	if nobodys.Spec.NodeName != "" || scheduledCondition(nobodys) != nil {
		t.Errorf("a pod for another scheduler was touched: %s", describe(nobodys))
	}
}

// The second-profile configuration: one process, two profiles, one account of the devices.
func TestSecondProfile(t *testing.T) {
	t.Parallel()
	reserveSharedProfiles(t)
	w := newWorld(t)
	startProcess(t, localcluster.SchedulerOptions{Config: secondProfile})
	const nodes, perNode, pods = 2, 5, 30
	for i := range nodes {
		w.addNode(fmt.Sprint(i), gpus(h100, perNode)...)
	}
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	audit := w.auditDevices()
	profiles := []string{v1.DefaultSchedulerName, "stowage"}
	for i := range pods {
		w.addPod(fmt.Sprintf("pod-%02d", i), withTemplate("one"), withScheduler(profiles[i%2]))
	}
	ended := sets.New[string]()
	w.awaitPods("ended", pods, 2*patience, func(p *v1.Pod) bool {
		if p.Spec.NodeName != "" && !ended.Has(p.Name) {
			ended.Insert(p.Name)
			w.endPod(p)
		}
		return p.Status.Phase == v1.PodSucceeded
	})
	for i := range profiles {
		w.awaitScheduledBy(fmt.Sprintf("pod-%02d", i), profiles[i])
	}
	audit.stop()
}

// awaitScheduledBy waits until the pod has a node and the event that says which profile gave it.
func (w *world) awaitScheduledBy(name, profile string) *v1.Pod {
	w.t.Helper()
	pod := w.awaitBound(name)
	lw := cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "events", w.name,
		fields.Set{"involvedObject.name": name, "reason": "Scheduled"}.AsSelector())
	event := await(w, "the event that pod "+name+" has been scheduled", lw, func(*v1.Event) bool { return true })
	if event.ReportingController != profile {
		w.t.Errorf("pod %s was scheduled by %s, want by %s", name, event.ReportingController, profile)
	}
	return pod
}

// Leader election: of two processes one works; when it is killed the other goes on.
func TestLeaderElection(t *testing.T) {
	t.Parallel()
	reserveSharedProfiles(t)
	w := newWorld(t)
	w.schedulerName = "stowage"
	w.addNode("a", gpus(h100, 2)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))

	options := localcluster.SchedulerOptions{Config: secondScheduler, LeaderElect: true}
	leader := startProcess(t, options)
	first := w.awaitLeaseHolder("")
	startProcess(t, options)
	w.addPod("first", withTemplate("one"))
	w.awaitBound("first")

	if err := leader.Kill(); err != nil {
		t.Fatalf("killing the leader: %v", err)
	}
	w.addPod("second", withTemplate("one"))
	if second := w.awaitLeaseHolder(first); second == first {
		t.Errorf("the lease is still held by %s", first)
	}
	pod := w.awaitBound("second")
	if got := devices(w.claim(claimName(pod, "one"))); len(got) != 1 || got[0] != "gpu-1" {
		t.Errorf("the second pod has the devices %q, want the one that the first leader had not given away", got)
	}
}

// awaitLeaseHolder waits until the lease that our configuration names is held by somebody else.
func (w *world) awaitLeaseHolder(not string) string {
	w.t.Helper()
	lw := cache.NewListWatchFromClient(w.client.CoordinationV1().RESTClient(), "leases", "stowage-system", named("stowage-scheduler"))
	lease := await(w, "another holder of the lease", lw, func(l *coordinationv1.Lease) bool {
		return l.Spec.HolderIdentity != nil && *l.Spec.HolderIdentity != "" && *l.Spec.HolderIdentity != not
	})
	return *lease.Spec.HolderIdentity
}
