// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
)

// notice is a nodeCondition that runs, with what it is told of the node.
type notice struct {
	t      *testing.T
	client *fake.Clientset

	mu   sync.Mutex
	view nodeView
	ok   bool
}

func (n *notice) set(v nodeView) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.view, n.ok = v, true
}

// written is what the Node says, with the time since the last transition, and how often it was written since the last time.
func (n *notice) written() (says string, writes int) {
	n.t.Helper()
	for _, action := range n.client.Actions() {
		if action.GetVerb() == "patch" {
			writes++
		}
	}
	n.client.ClearActions()
	node, err := n.client.CoreV1().Nodes().Get(n.t.Context(), "node-1", metav1.GetOptions{})
	if err != nil {
		n.t.Fatal(err)
	}
	for _, c := range node.Status.Conditions {
		says += fmt.Sprintf("%s=%s:%s since %s ", c.Type, c.Status, c.Reason, time.Since(c.LastTransitionTime.Time).Round(time.Second))
	}
	n.client.ClearActions()
	return says, writes
}

func (n *notice) want(says string, writes int) {
	n.t.Helper()
	got, wrote := n.written()
	if diff := cmp.Diff(says, got); diff != "" || wrote != writes {
		n.t.Errorf("%d writes, want %d; the Node says (-want +got):\n%s", wrote, writes, diff)
	}
}

// TestTheNodesConditionIsWrittenOnChangeOnly: and when the Node was made anew. Those of others stay.
func TestTheNodesConditionIsWrittenOnChangeOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "KubeletReady", LastTransitionTime: metav1.Now()}
		made := func() *corev1.Node {
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{ready}}}
			node.UID = "uid-of-node"
			return node
		}
		n := &notice{t: t, client: fake.NewClientset(made())}
		var fails atomic.Bool
		n.client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			return fails.Load(), nil, errors.New("the API server is away")
		})
		leads := make(chan struct{})
		c := &nodeCondition{client: n.client, node: "node-1", leads: leads, awaitFirstLooks: func(context.Context) {}, status: newStatus(), view: func() (nodeView, bool) {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.view, n.ok
		}}
		defer background(ctx, c.run)()
		sick := &problem{reasonFolderFull, "the folder is full"}

		n.set(nodeView{notReady: sick})
		time.Sleep(time.Minute)
		n.want("Ready=True:KubeletReady since 1m0s ", 0) // another agent publishes
		close(leads)
		time.Sleep(time.Minute + time.Second) // between two looks
		n.want("Ready=True:KubeletReady since 2m1s GPUsReady=False:FolderFull since 1m1s ", 1)

		n.set(nodeView{notReady: &problem{reasonFolderReadOnly, "the folder is read-only"}})
		time.Sleep(time.Minute)
		n.want("Ready=True:KubeletReady since 3m1s GPUsReady=False:FolderReadOnly since 2m1s ", 1)

		n.set(nodeView{gpus: []gpuView{{name: "gpu-0"}}})
		time.Sleep(10 * time.Minute)
		n.want("Ready=True:KubeletReady since 13m1s GPUsReady=True:AllGPUsReady since 9m59s ", 1)

		// The API server does not take it for a while.
		fails.Store(true)
		n.set(nodeView{notReady: sick})
		time.Sleep(time.Minute)
		if says, writes := n.written(); writes < 4 || writes > 8 {
			t.Errorf("tried %d times in a minute: %s", writes, says)
		}
		fails.Store(false)
		time.Sleep(time.Minute)
		if _, writes := n.written(); writes != 1 {
			t.Errorf("%d writes when it does again", writes)
		}

		if err := n.client.CoreV1().Nodes().Delete(ctx, "node-1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if _, err := n.client.CoreV1().Nodes().Create(ctx, made(), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * readNodeInterval)
		if says, writes := n.written(); writes != 1 {
			t.Errorf("%d writes for a Node that was made anew: %s", writes, says)
		}
	})
}

// TestATokenThatWasRefusedOnceIsTriedAtOnce: before the devices are taken out because of it.
func TestATokenThatWasRefusedOnceIsTriedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "uid-of-node"}})
		var fails atomic.Bool
		client.PrependReactor("get", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			return fails.Load(), nil, apierrors.NewUnauthorized("expired")
		})
		leads := make(chan struct{})
		close(leads)
		c := &nodeCondition{client: client, node: "node-1", leads: leads, awaitFirstLooks: func(context.Context) {}, status: newStatus(), view: func() (nodeView, bool) {
			return nodeView{gpus: []gpuView{{name: "gpu-0"}}}, true
		}}
		defer background(ctx, c.run)()
		time.Sleep(time.Second)
		refused := func() bool { reached, _ := c.status.get(stageAccepted); return !reached }
		c.status.refused(apierrors.NewUnauthorized("expired"))
		if time.Sleep(lasting - time.Second); refused() {
			t.Error("the token is taken, and the agent does not know it")
		}
		client.ClearActions()
		fails.Store(true)
		c.status.refused(apierrors.NewUnauthorized("expired"))
		time.Sleep(time.Minute)
		if n := len(client.Actions()); !refused() || n < 4 || n > 8 {
			t.Errorf("refused %v; tried %d times in a minute", refused(), n)
		}
	})
}

// A role of an older release may not write the Node. The answer that says so takes the token all the same.
func TestATokenThatIsTakenIsAcceptedThoughTheRoleIsOld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "uid-of-node"}})
		client.PrependReactor("patch", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "node-1", errors.New("no role"))
		})
		leads := make(chan struct{})
		close(leads)
		c := &nodeCondition{client: client, node: "node-1", leads: leads, awaitFirstLooks: func(context.Context) {}, status: newStatus(), view: func() (nodeView, bool) {
			return nodeView{gpus: []gpuView{{name: "gpu-0"}}}, true
		}}
		defer background(ctx, c.run)()
		synctest.Wait()
		c.status.refused(apierrors.NewUnauthorized("expired"))
		time.Sleep(retryNodeInterval + judgeInterval)
		synctest.Wait()
		if reached, why := c.status.get(stageAccepted); !reached {
			t.Errorf("not accepted: %+v", why)
		}
	})
}

// TestARestartDoesNotTurnTheNodesCondition: what the agent before knew is looked at before it is written.
func TestARestartDoesNotTurnTheNodesCondition(t *testing.T) {
	registerMetrics()
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r, api := newRig(t, "t4"), namingServer()
		run := func(do func(*Agent)) {
			agent := r.blindAgent(ctx, api)
			for _, st := range []stage{stageLedger, stageFolders, stageServing} {
				agent.status.set(st, true)
			}
			stopWatch, stopPublisher, stopCondition := background(ctx, agent.watch), background(ctx, agent.publisher.run), background(ctx, agent.condition.run)
			time.Sleep(20 * time.Second)
			do(agent)
			stopCondition()
			stopPublisher()
			stopWatch()
		}
		r.kubeletTakes = 10 * time.Second // as long it is not known what is occupied
		run(func(agent *Agent) {
			if _, err := agent.claims.Prepare(ctx, allocatedClaim("left", "gpu-0000-00-1b-0")); err != nil { // the API server does not know it any more
				t.Fatal(err)
			}
		})
		api.ClearActions()
		for range 2 {
			run(func(*Agent) {})
		}
		var written []string
		for _, action := range api.Actions() {
			if patch, ok := action.(clienttesting.PatchAction); ok && action.GetResource().Resource == "nodes" {
				written = append(written, string(patch.GetPatch()))
			}
		}
		if len(written) != 1 || !strings.Contains(written[0], reasonGPUsOccupied) {
			t.Errorf("after two restarts the condition was written %d times, want once, with %s:\n%s", len(written), reasonGPUsOccupied, strings.Join(written, "\n"))
		}
	})
}
