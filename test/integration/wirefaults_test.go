// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// wireFault is what becomes of a request on its way. deliver sends it to the API server.
type wireFault func(r *http.Request, deliver func(*http.Request) (*http.Response, error)) (*http.Response, error)

// answer is an API server's answer with a status, and with Retry-After if seconds is not empty: then the client tries
// again by itself.
func answer(r *http.Request, code int, seconds string) *http.Response {
	header := http.Header{"Content-Type": {"application/json"}}
	if seconds != "" {
		header.Set("Retry-After", seconds)
	}
	body := fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","message":"injected","code":%d}`, code)
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: r,
	}
}

// instead answers without delivering; after delivers and then answers something else.
func instead(response func(*http.Request) (*http.Response, error)) wireFault {
	return func(r *http.Request, _ func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		return response(r)
	}
}

func after(response func(*http.Request) (*http.Response, error)) wireFault {
	return func(r *http.Request, deliver func(*http.Request) (*http.Response, error)) (*http.Response, error) {
		if got, err := deliver(r); err == nil {
			_, _ = io.Copy(io.Discard, got.Body)
			_ = got.Body.Close()
		}
		return response(r)
	}
}

func withStatus(code int, retryAfter string) func(*http.Request) (*http.Response, error) {
	return func(r *http.Request) (*http.Response, error) { return answer(r, code, retryAfter), nil }
}

func cut(*http.Request) (*http.Response, error) { return nil, errCut }

// late delivers the request when the client has given it up.
func late(r *http.Request, deliver func(*http.Request) (*http.Response, error)) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	again := r.Clone(context.WithoutCancel(r.Context()))
	again.Body = io.NopCloser(bytes.NewReader(body))
	time.AfterFunc(200*time.Millisecond, func() {
		if got, err := deliver(again); err == nil {
			_ = got.Body.Close()
		}
	})
	return nil, context.DeadlineExceeded
}

var wireFaults = map[string]wireFault{
	"cut":             instead(cut),
	"cut-after":       after(cut),
	"500":             instead(withStatus(500, "")),
	"500-after":       after(withStatus(500, "")),
	"429-retry":       instead(withStatus(429, "1")),
	"503-retry-after": after(withStatus(503, "1")),
	"504-after":       after(withStatus(504, "")),
	"late":            late,
}

// bindsPod returns the name of the pod that a request binds.
func bindsPod(r *http.Request, namespace string) (pod string, binds bool) {
	pod, found := strings.CutPrefix(r.URL.Path, "/api/v1/namespaces/"+namespace+"/pods/")
	pod, binds = strings.CutSuffix(pod, "/binding")
	return pod, found && binds
}

// PreBind and Unreserve, against the real API server: each write of a pod with two claims goes wrong in each way, for
// pods side by side, and so does the binding. All get their devices, each device once, and when the pods are gone nothing
// is left.
func TestEveryWriteMayFail(t *testing.T) {
	t.Parallel()
	const writes, nodes, perNode = 4, 10, 8
	w := newWorld(t)
	var hits atomic.Int32
	var mutex sync.Mutex
	seen := map[string]int{} // writes of claims by case, bindings by pod
	inject := func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			if pod, binds := bindsPod(r, w.name); binds {
				mutex.Lock()
				seen[pod]++
				first := seen[pod] == 1
				mutex.Unlock()
				if fault := wireFaults[strings.TrimPrefix(pod, "binding-")]; first && fault != nil {
					hits.Add(1)
					return fault(r, next.RoundTrip)
				}
				return next.RoundTrip(r)
			}
			if !writesClaim(r, w.name) {
				return next.RoundTrip(r)
			}
			name, _, _ := strings.Cut(r.URL.Path[strings.LastIndex(strings.TrimSuffix(r.URL.Path, "/status"), "/")+1:], "/")
			kind, index, found := strings.Cut(name[:len(name)-len(".a")], ".")
			if !found {
				return next.RoundTrip(r)
			}
			mutex.Lock()
			n := seen[kind+index]
			seen[kind+index]++
			mutex.Unlock()
			if fmt.Sprint(n) != index {
				return next.RoundTrip(r)
			}
			hits.Add(1)
			return wireFaults[kind](r, next.RoundTrip)
		})
	}
	startScheduler(t, w.name, schedulerSetup{wrap: inject})
	for i := range nodes {
		w.addNode(fmt.Sprint(i), gpus(h100, perNode)...)
	}
	audit := w.auditDevices()
	var pods []*v1.Pod
	addPod := func(name string) {
		w.addClaim(name+".a", spec(w.exactly("gpu", 1)))
		w.addClaim(name+".b", spec(w.exactly("gpu", 1)))
		pods = append(pods, w.newPod(strings.ReplaceAll(name, ".", "-"), func(p *v1.Pod) {
			for _, suffix := range []string{".a", ".b"} {
				claim := name + suffix
				p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: suffix[1:], ResourceClaimName: &claim})
			}
		}))
	}
	for kind := range wireFaults {
		for index := range writes {
			addPod(fmt.Sprintf("%s.%d", kind, index))
		}
		addPod("binding-" + kind)
	}
	for _, pod := range pods {
		_, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, pod, metav1.CreateOptions{})
		w.must(err, "creating pod %s", pod.Name)
	}
	for _, pod := range pods {
		bound := w.awaitBound(pod.Name)
		for _, ref := range pod.Spec.ResourceClaims {
			claim := w.claim(*ref.ResourceClaimName)
			if len(devices(claim)) != 1 || len(claim.Status.ReservedFor) != 1 || claim.Status.ReservedFor[0].UID != bound.UID || !slices.Contains(claim.Finalizers, resourceapi.Finalizer) {
				t.Errorf("pod %s is bound: %s", pod.Name, describe(claim))
			}
		}
	}
	if int(hits.Load()) != len(pods) {
		t.Errorf("%d of %d cases were disturbed: the test proves less than it says", hits.Load(), len(pods))
	}
	t.Logf("%d pods, a fault each", len(pods))
	for _, pod := range pods {
		w.deletePod(pod.Name)
	}
	w.awaitAllReleased()
	if most := audit.stop(); most != 2*len(pods) {
		t.Errorf("at most %d devices were held at once, want %d", most, 2*len(pods))
	}
}
