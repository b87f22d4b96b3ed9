// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
	"stowage.dev/stowage/test/chaos/audit"
	"stowage.dev/stowage/test/liveness/memoryapi"
)

// A gang fits only where its first pod is put on node a, without pod p. The old scheduler may try it for ever with node b, and a new one find that.
func TestNobodyIsJudgedByTheNodeThatIsTriedFirst(t *testing.T) {
	scenario := Scenario{
		Groups: true,
		Nodes:  []Node{{Name: "a", GPUs: 1, Shared: 1}, {Name: "b", GPUs: 1, Shared: 1}},
		Steps: []Step{
			Pod{Name: "p", Grace: 24 * time.Hour, Extended: 1},
			Pod{Name: "unfit", Priority: 10, Ask: Ask{GPUs: 2}},
			Pod{Name: "q", Priority: 10, Ask: Ask{GPUs: 1}},
			Group{Name: "g", Priority: 10, Gang: 2, Ask: Ask{Share: 100}},
			Pod{Name: "r", Priority: 10, Group: "g", Common: true},
			Pod{Name: "s", Priority: 10, Extended: 1, Group: "g", Common: true},
		},
	}
	plays := 20
	if testing.Short() {
		plays = 6
	}
	excused := 0
	for range plays { // about every third time it is the wrong node
		h, differences := run(t, scenario, logr.Discard())
		for _, difference := range differences {
			t.Error(difference)
		}
		excused += h.counts["another node first"]
	}
	t.Logf("excused: %d", excused)
}

// A pod that sleeps though it could run, and one that could have others evicted, are seen beside a group that is tried again and again.
func TestWhoSleepsIsSeenWhateverNodeIsTriedFirst(t *testing.T) {
	for name, tc := range map[string]struct {
		holder *Pod
		want   []string
	}{
		"a pod that fits one node": {want: []string{"a new scheduler allocates or reserves claim", "a new scheduler binds pod p to b"}},
		"a pod that can have another one evicted there": {
			holder: &Pod{Name: "q", Grace: 24 * time.Hour, Ask: Ask{GPUs: 1}}, want: []string{"a new scheduler evicts pod q"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			prepareProcess()
			if err := switchGroups(true); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(*testing.T) {
				ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
				scenario := Scenario{Groups: true, Nodes: []Node{{Name: "a"}, {Name: "b", GPUs: 1}}}
				h := &history{ctx: ctx, scenario: scenario, api: memoryapi.New(), dead: map[string]bool{}, counts: map[string]int{}}
				h.user = h.api.Client("user")
				h.makeCluster()
				h.api.OnWrite(h.note)
				h.controllers = startControllers(ctx, h.api, true)
				if tc.holder != nil {
					h.start()
					tc.holder.do(h)
					h.sleep(time.Second)
					h.stop()
				}
				Pod{Name: "p", Ask: Ask{GPUs: 1}, Priority: 10}.do(h) // nobody hears of it
				h.sleep(time.Second)
				h.groups.at = time.Now()
				got := h.judgeSuccessor(h.api.Clone())
				h.controllers.stop()
				cancel()
				time.Sleep(h.quiet())
				synctest.Wait()
				if diff := cmp.Diff(tc.want, withoutClaims(got)); diff != "" {
					t.Errorf("differences (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// A nomination for which nobody ends keeps a pod from having others evicted, of a new scheduler, too. So it is asked what one does without it.
func TestNominationsForWhichNobodyEnds(t *testing.T) {
	const difference = "a new scheduler evicts pod low that does not know for which nodes pods are nominated where nobody ends for them: map[p:a]"
	for name, tc := range map[string]struct {
		holder Pod
		steps  []Step
		want   []string
	}{
		"one of higher priority": {holder: Pod{Priority: 20, Grace: 24 * time.Hour}, steps: []Step{Delete{Pod: "holder"}}, want: []string{difference}},
		"one of lower priority":  {holder: Pod{Grace: 24 * time.Hour}, steps: []Step{Delete{Pod: "holder"}}},
		"nobody":                 {holder: Pod{Priority: 20}, want: []string{difference}},
	} {
		t.Run(name, func(t *testing.T) {
			prepareProcess()
			if err := switchGroups(false); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(*testing.T) {
				ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logr.Discard()))
				scenario := Scenario{Nodes: []Node{{Name: "a", GPUs: 1}, {Name: "b", Shared: 1}}}
				h := &history{ctx: ctx, scenario: scenario, api: memoryapi.New(), dead: map[string]bool{}, counts: map[string]int{}}
				h.user = h.api.Client("user")
				h.makeCluster()
				h.api.OnWrite(h.note)
				h.controllers = startControllers(ctx, h.api, false)
				h.start()
				tc.holder.Name, tc.holder.Ask = "holder", Ask{GPUs: 1}
				tc.holder.do(h)
				Pod{Name: "low", Grace: 24 * time.Hour, Ask: Ask{Share: 100}}.do(h)
				h.sleep(time.Second)
				h.stop()
				for _, step := range tc.steps {
					step.do(h)
				}
				Pod{Name: "p", Priority: 10, Ask: Ask{Share: 100}}.do(h) // nobody hears of it
				h.sleep(time.Second)                                     // but who makes its claim, and writes to it
				h.nominate(func(pod *v1.Pod) {
					if pod.Name == "p" {
						pod.Status.NominatedNodeName = "a"
					}
				})
				got := h.judgeNominations(h.api.Clone(), h.waitsInVain())
				h.controllers.stop()
				cancel()
				time.Sleep(h.quiet())
				synctest.Wait()
				if diff := cmp.Diff(tc.want, got); diff != "" || h.err != nil {
					t.Errorf("differences (-want +got):\n%s%v", diff, h.err)
				}
			})
		})
	}
}

// A claim is held for a pod that waits: that is a difference, but where a scheduler that is gone has left it to a gang that is short of
// pods. A claim is held for a group whose pods wait: that is one where they are tried.
func TestClaimsOfPodsThatWait(t *testing.T) {
	const difference = "claim c holds devices for pod p, which waits"
	const ofGroup = "claim c holds devices for group g, whose pods wait"
	user := func(name string) Pod { return Pod{Name: name, Group: "g", Claims: []string{"other", "c"}} }
	two := []Pod{user("p"), user("q")}
	withOthers := []Pod{user("p"), {Name: "q", Group: "g", Claims: []string{"other"}}, {Name: "r", Group: "h", Claims: []string{"c"}}}
	for name, tc := range map[string]struct {
		gang     int
		pods     []Pod
		ownWrite bool
		ofOther  bool   // only, for another pod
		forGroup bool   // and not for p
		bound    string // a pod
		keptBack string // a pod, by PreEnqueue
		want     []string
	}{
		"a group whose pods wait":                    {pods: two, forGroup: true, want: []string{ofGroup}},
		"a gang whose pods wait":                     {gang: 2, pods: two, forGroup: true, want: []string{ofGroup}},
		"a group one of whose pods has a node":       {pods: two, forGroup: true, bound: "q"},
		"that pod does not use it":                   {pods: withOthers, forGroup: true, bound: "q", want: []string{ofGroup}},
		"that pod is another group's":                {pods: withOthers, forGroup: true, bound: "r", want: []string{ofGroup}},
		"a group whose pods do not use it":           {pods: []Pod{{Name: "p", Group: "g", Claims: []string{"other"}}}, forGroup: true},
		"a group without pods":                       {pods: []Pod{{Name: "p"}}, forGroup: true},
		"the group of a gang, short of pods":         {gang: 3, pods: two, forGroup: true},
		"that group's, by the present one":           {gang: 3, pods: two, forGroup: true, ownWrite: true},
		"a group one of whose pods is kept back":     {pods: two, forGroup: true, keptBack: "q"},
		"that pod does not use it, either":           {pods: withOthers, forGroup: true, keptBack: "q"},
		"that pod has a node by now":                 {pods: withOthers, forGroup: true, keptBack: "q", bound: "q", want: []string{ofGroup}},
		"a pod of another group is kept back":        {pods: withOthers, forGroup: true, keptBack: "r", want: []string{ofGroup}},
		"a pod of a group is, and the claim is its":  {pods: two, keptBack: "p", want: []string{difference}},
		"a pod without a group":                      {pods: []Pod{{Name: "p"}}, want: []string{difference}},
		"a gang that is short of pods":               {gang: 2, pods: []Pod{{Name: "p", Group: "g"}}},
		"that gang's, reserved by the present one":   {gang: 3, pods: two, ownWrite: true, want: []string{difference}},
		"that gang's, which the present one shares":  {gang: 3, pods: two, ofOther: true},
		"a gang that has all its pods":               {gang: 2, pods: two, want: []string{difference}},
		"a gang of two, beside pods of other groups": {gang: 2, pods: []Pod{{Name: "p", Group: "g"}, {Name: "q", Group: "h"}, {Name: "r"}}},
		"a group whose pods get what they can":       {pods: []Pod{{Name: "p", Group: "g"}}, want: []string{difference}},
		"a pod of another scheduler":                 {pods: []Pod{{Name: "p", Foreign: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			h := &history{ctx: ctx, api: memoryapi.New(), counts: map[string]int{}}
			h.user = h.api.Client("user")
			Group{Name: "g", Gang: tc.gang}.do(h)
			for _, pod := range tc.pods {
				pod.do(h)
			}
			if tc.keptBack != "" {
				h.keepBack(t, tc.keptBack)
			}
			Claim{Name: "c", Ask: Ask{GPUs: 1}}.do(h)
			claims := h.user.ResourceV1().ResourceClaims(namespace)
			claim, err := claims.Get(ctx, "c", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			pod, err := h.user.CoreV1().Pods(namespace).Get(ctx, "p", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			claim.Status.Allocation = &resourceapi.AllocationResult{}
			claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: pod.UID}}
			if tc.forGroup {
				group, err := h.user.SchedulingV1beta1().PodGroups(namespace).Get(ctx, "g", metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "podgroups", Name: "g", UID: group.UID}}
			}
			if tc.bound != "" {
				binding := &v1.Binding{ObjectMeta: metav1.ObjectMeta{Name: tc.bound}, Target: v1.ObjectReference{Kind: "Node", Name: "a"}}
				if err := h.user.CoreV1().Pods(namespace).Bind(ctx, binding, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if claim, err = claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if tc.ownWrite {
				h.writes = []memoryapi.Write{{Object: claim}}
			}
			if tc.ofOther {
				h.writes = []memoryapi.Write{{Before: claim, Object: claim}}
			}
			if diff := cmp.Diff(tc.want, h.judgeRest()); diff != "" || h.err != nil {
				t.Errorf("differences (-want +got):\n%s%v", diff, h.err)
			}
		})
	}
}

// keepBack has a pod's condition say that PreEnqueue keeps it back. Nothing else is made for that.
func (h *history) keepBack(t *testing.T, name string) {
	t.Helper()
	pod, err := h.user.CoreV1().Pods(namespace).Get(h.ctx, name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: deviceclaims.ReasonWaitingForClaim}}
	if _, err := h.user.CoreV1().Pods(namespace).UpdateStatus(h.ctx, pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A claim that another scheduler lets go of may stay allocated for nobody, and no other one.
func TestClaimsForNobody(t *testing.T) {
	const difference = "claim c holds devices for nobody"
	for name, tc := range map[string]struct {
		steps []Step
		want  []string
	}{
		"any claim":                       {want: []string{difference}},
		"another scheduler lets go of it": {steps: []Step{Reserve{Claim: "c", Pod: "f"}, Unreserve{Claim: "c", Pod: "f"}}},
		"it lets go of another one":       {steps: []Step{Reserve{Claim: "c", Pod: "f"}, Unreserve{Claim: "d", Pod: "f"}}, want: []string{difference}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			h := &history{ctx: ctx, api: memoryapi.New(), counts: map[string]int{}, scenario: Scenario{Steps: tc.steps}}
			h.user = h.api.Client("user")
			Claim{Name: "c", Ask: Ask{GPUs: 1}}.do(h)
			claims := h.user.ResourceV1().ResourceClaims(namespace)
			claim, err := claims.Get(ctx, "c", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			claim.Status.Allocation = &resourceapi.AllocationResult{}
			if _, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, h.judgeRest()); diff != "" || h.err != nil {
				t.Errorf("differences (-want +got):\n%s%v", diff, h.err)
			}
		})
	}
}

// A scheduler that may be binding a pod has noted that in a claim: by the pod, or by the group that the claim is reserved for. Of two
// claims only the second has a note.
func TestWhoMayBeBound(t *testing.T) {
	alone, ofGroup := []Pod{{Name: "p"}}, []Pod{{Name: "p", Group: "g"}}
	two := []Pod{{Name: "p", Group: "g"}, {Name: "q", Group: "g"}}
	others := []Pod{{Name: "p", Group: "g"}, {Name: "q", Group: "other"}}
	for name, tc := range map[string]struct {
		pods      []Pod
		bound     []string
		forGroup  bool // and not for p
		forNobody bool // any more
		elsewhere bool // the claim is in another namespace
		noted     time.Duration
		want      bool
	}{
		"a pod that waits":                    {pods: alone, want: true},
		"a pod with a node":                   {pods: alone, bound: []string{"p"}},
		"a pod beside one that waits":         {pods: []Pod{{Name: "p"}, {Name: "q"}}, bound: []string{"p"}},
		"the note is old":                     {pods: alone, noted: adoptionLasts},
		"the reservation is taken back":       {pods: alone, forNobody: true},
		"a group whose pods wait":             {pods: two, forGroup: true, want: true},
		"a group one of whose pods waits":     {pods: two, bound: []string{"p"}, forGroup: true, want: true},
		"a group whose pods have nodes":       {pods: two, bound: []string{"p", "q"}, forGroup: true},
		"another group waits":                 {pods: others, bound: []string{"p"}, forGroup: true},
		"a pod without a group waits":         {pods: []Pod{{Name: "p", Group: "g"}, {Name: "q"}}, bound: []string{"p"}, forGroup: true},
		"a group of that name elsewhere":      {pods: ofGroup, forGroup: true, elsewhere: true},
		"the note about the group is old":     {pods: ofGroup, forGroup: true, noted: adoptionLasts},
		"the group's reservation is gone":     {pods: ofGroup, forGroup: true, forNobody: true},
		"a pod's own claim, its group waits":  {pods: two, bound: []string{"p"}},
		"a pod of a group, and its own claim": {pods: ofGroup, want: true},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := context.Background()
			h := &history{ctx: ctx, api: memoryapi.New(), counts: map[string]int{}}
			h.user = h.api.Client("user")
			user := resourceapi.ResourceClaimConsumerReference{Resource: "podgroups", Name: "g", UID: "group-uid"}
			for _, pod := range tc.pods {
				pod.do(h)
			}
			if !tc.forGroup {
				pod, err := h.user.CoreV1().Pods(namespace).Get(ctx, "p", metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				user = resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: "p", UID: pod.UID}
			}
			for _, name := range tc.bound {
				binding := &v1.Binding{ObjectMeta: metav1.ObjectMeta{Name: name}, Target: v1.ObjectReference{Kind: "Node", Name: "a"}}
				if err := h.user.CoreV1().Pods(namespace).Bind(ctx, binding, metav1.CreateOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			Claim{Name: "other", Ask: Ask{GPUs: 1}}.do(h)
			claims := h.user.ResourceV1().ResourceClaims(namespace)
			if tc.elsewhere {
				claims = h.user.ResourceV1().ResourceClaims("team-b")
			}
			note := "scheduler-0 " + time.Now().Add(-tc.noted).UTC().Format(time.RFC3339Nano)
			claim, err := claims.Create(ctx, &resourceapi.ResourceClaim{
				ObjectMeta: metav1.ObjectMeta{Name: "c", Annotations: map[string]string{"adopted.stowage.dev/" + string(user.UID): note}},
				Spec:       Ask{GPUs: 1}.spec(),
			}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if !tc.forNobody {
				claim.Status.Allocation = &resourceapi.AllocationResult{}
				claim.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "gone", UID: "gone"}, user}
			}
			if _, err := claims.UpdateStatus(ctx, claim, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if got := h.mayBeBound(); got != tc.want || h.err != nil {
				t.Errorf("%t, want %t; error: %v", got, tc.want, h.err)
			}
		})
	}
}

// withoutClaims leaves the names of claims out, which are generated.
func withoutClaims(differences []string) (all []string) {
	const prefix = "a new scheduler allocates or reserves claim"
	for _, d := range differences {
		if len(d) > len(prefix) && d[:len(prefix)] == prefix {
			d = prefix
		}
		all = append(all, d)
	}
	return all
}

// A difference counts that two of three plays show, whichever these are. All three are played.
func TestADifferenceCountsThatTwoOfThreePlaysShow(t *testing.T) {
	for name, tc := range map[string]struct {
		fails []bool // after the first play, which did
		plays int
		flaky bool
	}{
		"never again":     {fails: []bool{false, false}, plays: 1, flaky: true},
		"the second time": {fails: []bool{true, false}, plays: 2},
		"the third time":  {fails: []bool{false, true}, plays: 2},
		"always":          {fails: []bool{true, true}, plays: 3},
	} {
		t.Run(name, func(t *testing.T) {
			played := 0
			plays, flaky := again(func() bool { played++; return tc.fails[played-1] })
			if plays != tc.plays || flaky != tc.flaky || played != len(tc.fails) {
				t.Errorf("shown by %d plays, flaky: %t, played again %d times, want %d, %t, %d", plays, flaky, played, tc.plays, tc.flaky, len(tc.fails))
			}
		})
	}
}

// That a scheduler says why a pod of a group waits is no unrest. That it nominates one, or takes that back, is.
func TestNominationsThatFlipAreNoRest(t *testing.T) {
	const scheduler = "scheduler-1"
	for name, tc := range map[string]struct {
		client string
		group  string
		nodes  [2]string // of p and q, which both had none
		moves  bool
	}{
		"other conditions":             {client: scheduler, group: "g"},
		"the second pod is nominated":  {client: scheduler, group: "g", nodes: [2]string{"", "b"}, moves: true},
		"both are":                     {client: scheduler, group: "g", nodes: [2]string{"a", "b"}, moves: true},
		"a pod without a group":        {client: scheduler, moves: true},
		"somebody else writes to them": {client: "user", group: "g", moves: true},
	} {
		t.Run(name, func(t *testing.T) {
			h := &history{over: audit.NewHistory(audit.NewInventory(nil)), counts: map[string]int{}}
			says := func(nodes [2]string) (moved bool) {
				for i, name := range []string{"p", "q"} {
					pod := Pod{Name: name, Group: tc.group}.object()
					pod.UID, pod.Status.NominatedNodeName = types.UID(name), nodes[i]
					h.moved = time.Time{}
					h.note(memoryapi.Write{Client: tc.client, Verb: "patch", What: "pods/status", Object: pod})
					moved = moved || !h.moved.IsZero()
				}
				return moved
			}
			says([2]string{})
			for range 2 {
				if moved := says(tc.nodes); moved != tc.moves {
					t.Errorf("unrest after %v: %t, want %t", tc.nodes, moved, tc.moves)
				}
				if moved := says([2]string{}); moved != tc.moves {
					t.Errorf("unrest after that: %t, want %t", moved, tc.moves)
				}
			}
		})
	}
}

// Groups are tried at rest, but not often, and then Reserve refuses none of their pods.
func TestGroupsThatAreTriedTooOftenAreNotAtRest(t *testing.T) {
	for name, tc := range map[string]struct {
		groups, tries, refusals int
		want                    string
	}{
		"as often as the queue does":  {groups: 1, tries: triesPerMinute},
		"as often, for each of two":   {groups: 2, tries: 2 * triesPerMinute},
		"more often":                  {groups: 1, tries: triesPerMinute + 1, want: "no rest: 1 groups that wait have been tried 8 times in the last minute"},
		"though none waits":           {tries: 1, want: "no rest: 0 groups that wait have been tried 1 times in the last minute"},
		"Reserve has refused one pod": {groups: 1, tries: 1, refusals: 1, want: "no rest: Reserve has refused 1 pods in the last minute"},
	} {
		t.Run(name, func(t *testing.T) {
			h := &history{ctx: t.Context(), api: memoryapi.New()}
			h.user = h.api.Client("user")
			for i := range tc.groups {
				for _, pod := range []string{"p", "q"} {
					Pod{Name: fmt.Sprint(pod, i), Group: fmt.Sprint("g", i)}.do(h)
				}
			}
			before := h.groupWork()
			h.groups.tries += tc.tries
			before.refusals -= tc.refusals
			if got := h.judgeGroupWork(before); got != tc.want || h.err != nil {
				t.Errorf("%q, want %q; error: %v", got, tc.want, h.err)
			}
		})
	}
}
