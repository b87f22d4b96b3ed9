// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"k8s.io/client-go/util/retry"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/pkg/plugins/config"
)

// ownRule is the rule of the profile "stowage".
const ownRule = "stowage-owned-by-stowage"

// allowOwnership gives the scheduler the rights that ownership needs.
func (w *world) allowOwnership() {
	w.t.Helper()
	w.must(cluster.Apply(w.ctx, filepath.Join(manifests, "ownership")), "granting the rights for ownership")
}

// reserveOwnership is for a test that serves the shared profiles, and so may have their rule.
func (w *world) reserveOwnership() {
	w.t.Helper()
	w.allowOwnership()
	w.t.Cleanup(func() { w.cleanUp(w.client.ResourceV1().DeviceTaintRules().Delete, ownRule) })
}

// withOwnership has the profile own the devices of the world, or no longer.
func (w *world) withOwnership(enabled bool) func(*schedulerconfig.KubeSchedulerConfiguration) {
	return func(c *schedulerconfig.KubeSchedulerConfiguration) {
		for i := range c.Profiles {
			for j := range c.Profiles[i].PluginConfig {
				if args, ok := c.Profiles[i].PluginConfig[j].Args.(*config.DeviceClaimsArgs); ok {
					args.Ownership.Enabled, args.Ownership.Driver = ptr.To(enabled), w.driver
				}
			}
		}
	}
}

// ownershipConfig is a configuration file in which the profile "stowage" owns the devices of the world, or no
// longer. Other profiles are as they are in the file.
func (w *world) ownershipConfig(file string, enabled string) string {
	w.t.Helper()
	text, err := os.ReadFile(file)
	w.must(err, "reading %s", file)
	head, profile, found := strings.Cut(string(text), "- schedulerName: stowage\n")
	if !found {
		w.t.Fatalf("%s has no profile stowage", file)
	}
	line := "      filterTimeout: 10s\n"
	if !strings.Contains(profile, line) {
		w.t.Fatalf("%s: the arguments of profile stowage have changed", file)
	}
	profile = strings.Replace(profile, line, line+"      ownership: {enabled: "+enabled+", driver: "+w.driver+"}\n", 1)
	return writeConfig(w.t, head+"- schedulerName: stowage\n"+profile)
}

func (w *world) ruleList() cache.ListerWatcher {
	return cache.NewListWatchFromClient(w.client.ResourceV1().RESTClient(), "devicetaintrules", "", named(ownRule))
}

// awaitOwnership waits until the rule keeps others off the devices of the world, and is another one than the given
// one.
func (w *world) awaitOwnership(not *resourceapi.DeviceTaintRule) *resourceapi.DeviceTaintRule {
	w.t.Helper()
	return await(w, "the rule that keeps others off", w.ruleList(), func(r *resourceapi.DeviceTaintRule) bool {
		return (not == nil || r.UID != not.UID) &&
			r.Spec.DeviceSelector != nil && ptr.Deref(r.Spec.DeviceSelector.Driver, "") == w.driver &&
			r.Spec.Taint.Key == "stowage.dev/owned" && r.Spec.Taint.Effect == resourceapi.DeviceTaintEffectNoSchedule
	})
}

// awaitNoOwnership waits until the rule is gone.
func (w *world) awaitNoOwnership() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	list, err := w.client.ResourceV1().DeviceTaintRules().List(ctx, metav1.ListOptions{FieldSelector: named(ownRule).String()})
	w.must(err, "listing the rule")
	if len(list.Items) == 0 {
		return
	}
	_, err = watchtools.Until(ctx, list.ResourceVersion, w.ruleList(), func(e watch.Event) (bool, error) {
		return e.Type == watch.Deleted, nil
	})
	w.must(err, "waiting for the rule to be gone")
}

// Ownership keeps the real kube-scheduler off our devices, and only it: our pods get them, somebody else's taint
// counts for us, too, and when it is switched off the devices are everybody's again.
func TestOwnership(t *testing.T) {
	t.Parallel()
	reserveSharedProfiles(t)
	w := newWorld(t)
	w.schedulerName = "stowage"
	w.reserveOwnership()
	w.addNode("a", gpus(h100, 4)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	rules := w.client.ResourceV1().DeviceTaintRules()

	t.Run("on", func(t *testing.T) {
		startScheduler(t, "stowage", schedulerSetup{edit: w.withOwnership(true)})
		rule := w.awaitOwnership(nil)
		// Deleted by hand, it is made again; changed by hand, it is repaired.
		w.must(rules.Delete(w.ctx, ownRule, metav1.DeleteOptions{}), "deleting the rule")
		w.awaitOwnership(rule)
		// kube-controller-manager writes the rule's status at any time.
		w.must(retry.RetryOnConflict(retry.DefaultRetry, func() error {
			changed, err := rules.Get(w.ctx, ownRule, metav1.GetOptions{})
			if err != nil {
				return err
			}
			changed.Spec.Taint.Effect = resourceapi.DeviceTaintEffectNone
			_, err = rules.Update(w.ctx, changed, metav1.UpdateOptions{})
			return err
		}), "changing the rule")
		w.awaitOwnership(nil)

		// kube-scheduler comes now: while the rule was away, a pod of its that waited would have taken a device.
		stock, err := cluster.StartStockScheduler(w.ctx, localcluster.SchedulerOptions{})
		w.must(err, "starting the stock scheduler")
		stopAtEnd(w.t, stock)
		w.addPod("stock", withTemplate("one"), withScheduler(v1.DefaultSchedulerName))
		w.addPod("ours", withTemplate("one"))
		w.awaitBoundTo("ours", "a")
		w.awaitUnschedulable("stock", "cannot allocate all claims")

		// Another's taints count for us beside our own.
		lost := resourceapi.DeviceTaint{Key: "example.com/lost", Effect: resourceapi.DeviceTaintEffectNoSchedule}
		var others []string
		for _, device := range []string{"gpu-1", "gpu-2", "gpu-3"} {
			others = append(others, w.addTaintRule("a", device, lost))
		}
		// Rules and pods come to the scheduler by two watches: until it has all rules it gives out what it does not know to be tainted.
		for i := 0; ; i++ {
			early := fmt.Sprint("early-", i)
			w.addPod(early, withTemplate("one"))
			tried := w.awaitPod(early, "tried", func(p *v1.Pod) bool { return scheduledCondition(p) != nil })
			w.deletePod(early)
			w.awaitPodGone(early)
			if tried.Spec.NodeName == "" && scheduledCondition(tried).Status == v1.ConditionFalse {
				break
			}
		}
		w.addPod("late", withTemplate("one"))
		w.awaitUnschedulable("late", "1 tainted example.com/lost by DeviceTaintRule "+others[0], "by DeviceTaintRule "+others[1], "by DeviceTaintRule "+others[2], "1 of 4", "held")
		w.must(rules.Delete(w.ctx, others[0], metav1.DeleteOptions{}), "deleting the rule of gpu-1")
		pod := w.awaitBoundTo("late", "a")
		if got := devices(w.claim(claimName(pod, "one"))); len(got) != 1 || got[0] != "gpu-1" {
			t.Errorf("the late pod has the devices %q, want gpu-1", got)
		}
		w.must(rules.Delete(w.ctx, others[1], metav1.DeleteOptions{}), "deleting the rule of gpu-2")
	})
	t.Run("stays while the scheduler is away", func(t *testing.T) {
		w.awaitOwnership(nil)
		pod := w.awaitPod("stock", "there", func(*v1.Pod) bool { return true })
		if pod.Spec.NodeName != "" {
			t.Errorf("the stock scheduler bound a pod to an owned device: %s", describe(pod))
		}
	})
	t.Run("off", func(t *testing.T) {
		startScheduler(t, "stowage", schedulerSetup{edit: w.withOwnership(false)})
		w.awaitNoOwnership()
		w.awaitBoundTo("stock", "a")
	})
}

// In the second-profile configuration one process has both profiles: devices that one of them owns are used by
// the pods of both, and by nobody else.
func TestOwnershipInSecondProfile(t *testing.T) {
	t.Parallel()
	reserveSharedProfiles(t)
	w := newWorld(t)
	w.reserveOwnership()
	w.addNode("a", gpus(h100, 2)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	startProcess(t, localcluster.SchedulerOptions{Config: w.ownershipConfig(secondProfile, "true")})
	w.awaitOwnership(nil)
	for _, profile := range []string{v1.DefaultSchedulerName, "stowage"} {
		w.addPod(profile, withTemplate("one"), withScheduler(profile))
		w.awaitScheduledBy(profile, profile)
	}
}

// Of several replicas the leader alone keeps the rule: one that was started with other arguments waits until it leads.
func TestOwnershipIsTheLeaders(t *testing.T) {
	t.Parallel()
	reserveSharedProfiles(t)
	w := newWorld(t)
	w.reserveOwnership()
	leader := startProcess(t, localcluster.SchedulerOptions{Config: w.ownershipConfig(secondScheduler, "true"), LeaderElect: true})
	rule := w.awaitOwnership(nil)
	first := w.awaitLeaseHolder("")

	startProcess(t, localcluster.SchedulerOptions{Config: w.ownershipConfig(secondScheduler, "false"), LeaderElect: true})
	if now := w.awaitOwnership(nil); now.UID != rule.UID {
		t.Error("a replica that does not lead has had the rule made again")
	}
	w.must(leader.Kill(), "killing the leader")
	w.awaitLeaseHolder(first)
	w.awaitNoOwnership()
}

// The rights for ownership reach the rules of the profiles that our configurations have, and no others.
func TestOwnershipRights(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.allowOwnership()
	identity, err := schedulerIdentity()
	w.must(err, "getting the scheduler's identity")
	rules := kubernetes.NewForConfigOrDie(identity).ResourceV1().DeviceTaintRules()
	w.addNode("a", gpus(h100, 1)...)
	others := w.addTaintRule("a", "gpu-0", resourceapi.DeviceTaint{Key: "example.com/lost", Effect: resourceapi.DeviceTaintEffectNoSchedule})

	checkRefused(t, rules.Delete(w.ctx, others, metav1.DeleteOptions{}), "devicetaintrules")
	rule, err := w.client.ResourceV1().DeviceTaintRules().Get(w.ctx, others, metav1.GetOptions{})
	w.must(err, "getting the rule")
	_, err = rules.Update(w.ctx, rule, metav1.UpdateOptions{})
	checkRefused(t, err, "devicetaintrules")
}
