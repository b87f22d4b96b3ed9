// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// leastFollowed is how many tests have to end with a pod that runs by what 'why' proposes, when all tests run.
const leastFollowed = 5

// followed counts the tests that ended so, and following the time that this took them.
var (
	followed  atomic.Int32
	following atomic.Int64
)

// shippedSchedulers are the schedulers that run as they are shipped, with the files of their configurations, by name.
var shippedSchedulers sync.Map

// isAsShipped tells whether a scheduler has the configuration of a file, and nothing between it and the shared API server.
func (s *schedulerSetup) isAsShipped() bool {
	return s.edit == nil && s.wrap == nil && s.probe == nil && s.meter == nil && s.identity == nil
}

// followAdviceAtTheEnd has the test end with what 'kubectl stowage why' proposes, if a pod waits then. It is called when a pod is seen to
// wait: what the test has made until then is still there, as tests clean up what they made last first.
func (w *world) followAdviceAtTheEnd() {
	w.t.Cleanup(func() {
		if w.t.Failed() || w.t.Skipped() || w.followed {
			return
		}
		w.followed = true // if a test has seen several pods wait
		if config, ok := shippedSchedulers.Load(w.schedulerName); ok {
			w.followAdvice(config.(string))
		}
	})
}

// followAdvice does what 'kubectl stowage why' proposes first as the smallest release for a pod that waits, and the pod has to get a node. So
// ends each test with a scheduler as it is shipped if a pod that it has seen waiting still waits for devices.
func (w *world) followAdvice(config string) {
	t, test := w.t, w
	if _, err := pluginBinary(); err != nil { // which other tests need, too
		t.Fatalf("building the plugin: %v", err)
	}
	begun := time.Now()
	defer func() { following.Add(int64(time.Since(begun))) }()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	w = &world{t: t, ctx: ctx, client: test.client, name: test.name, schedulerName: test.schedulerName} // the test's context has ended
	waiting, others := w.waiting()
	if waiting == nil {
		return
	}
	release := w.smallestRelease(waiting, config)
	if len(release) == 0 {
		return
	}
	for _, pod := range others { // which may get the devices first
		w.deleteNow(pod.Namespace, pod.Name)
	}
	for _, claim := range release {
		w.release(claim.Namespace, claim.Claim)
	}
	bound := w.awaitPod(waiting.Name, "bound, after "+describeRelease(release)+" went, as 'kubectl stowage why' proposes",
		func(p *v1.Pod) bool { return p.Spec.NodeName != "" })
	if node := release[0].Node; bound.Spec.NodeName != node {
		t.Errorf("pod %s is on node %s, and 'kubectl stowage why' proposed a release on node %s", bound.Name, bound.Spec.NodeName, node)
	}
	followed.Add(1)
}

// waiting returns the first of the world's pods for which its scheduler has found no node, by name, and all others without a node.
func (w *world) waiting() (first *v1.Pod, others []*v1.Pod) {
	w.t.Helper()
	pods, err := w.client.CoreV1().Pods(w.name).List(w.ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=,status.phase=Pending"})
	w.must(err, "listing the pods that wait")
	slices.SortFunc(pods.Items, func(a, b v1.Pod) int { return strings.Compare(a.Name, b.Name) })
	for i := range pods.Items {
		pod := &pods.Items[i]
		if pod.Spec.SchedulerName != w.schedulerName || pod.DeletionTimestamp != nil {
			continue
		}
		refused := scheduledCondition(pod)
		if first == nil && refused != nil && refused.Status == v1.ConditionFalse && refused.Reason == v1.PodReasonUnschedulable && pod.Spec.SchedulingGroup == nil {
			first = pod
		} else {
			others = append(others, pod)
		}
	}
	return first, others
}

// released is a claim that is to be released on a node.
type released struct{ Node, Namespace, Claim string }

// smallestRelease is the first release that 'why' proposes, as the user sees it: none if devices are not what is missing.
func (w *world) smallestRelease(pod *v1.Pod, config string) (claims []released) {
	w.t.Helper()
	binary, err := pluginBinary()
	w.must(err, "building the plugin")
	out, errOut, code := w.runs(exec.CommandContext(w.ctx, binary, "why", pod.Name, "-n", pod.Namespace, "-o", "json",
		"--scheduler-config", config, "--kubeconfig", cluster.AdminKubeconfig()))
	var why struct {
		State   string
		Outcome *struct {
			Explanation *struct {
				Holders []struct {
					Node    string
					Release []struct{ Namespace, Claim string }
				}
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &why); err != nil || code != 0 && code != 3 {
		w.t.Fatalf("why %s/%s: exit code %d, %v: %s%s", pod.Namespace, pod.Name, code, err, out, errOut)
	}
	if why.State != "waits" || why.Outcome == nil || why.Outcome.Explanation == nil || len(why.Outcome.Explanation.Holders) == 0 {
		return nil
	}
	first := why.Outcome.Explanation.Holders[0]
	for _, claim := range first.Release {
		claims = append(claims, released{first.Node, claim.Namespace, claim.Claim})
	}
	return claims
}

func describeRelease(claims []released) string {
	var names []string
	for _, claim := range claims {
		names = append(names, "claim "+claim.Namespace+"/"+claim.Claim)
	}
	return strings.Join(names, ", ")
}

// release deletes a claim and the pods that use it.
func (w *world) release(namespace, name string) {
	w.t.Helper()
	claims := w.client.ResourceV1().ResourceClaims(namespace)
	claim, err := claims.Get(w.ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return
	}
	w.must(err, "getting claim %s/%s", namespace, name)
	for _, user := range claim.Status.ReservedFor {
		w.deleteNow(namespace, user.Name)
	}
	if err := claims.Delete(w.ctx, name, metav1.DeleteOptions{}); !apierrors.IsNotFound(err) {
		w.must(err, "deleting claim %s/%s", namespace, name)
	}
}

func (w *world) deleteNow(namespace, pod string) {
	w.t.Helper()
	err := w.client.CoreV1().Pods(namespace).Delete(w.ctx, pod, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
	if !apierrors.IsNotFound(err) {
		w.must(err, "deleting pod %s/%s", namespace, pod)
	}
}
