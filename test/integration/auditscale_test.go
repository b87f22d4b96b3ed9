// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"

	"stowage.dev/stowage/internal/localcluster"
	"stowage.dev/stowage/pkg/plugins/config"
)

// With more claims than a page of a list has, three times over, the auditor compares all of them: it misses the claim on the last page
// of which the scheduler was not told, and nothing else. The claims have a cluster of their own, as they would be in every other test's way.
func TestAuditOfManyClaims(t *testing.T) {
	t.Parallel()
	const claims, writers = 3500, 64
	own := startCrowdedCluster(t)
	w := newWorldIn(t, own)
	admin := rest.CopyConfig(own.AdminConfig())
	admin.QPS = -1
	client := kubernetes.NewForConfigOrDie(admin).ResourceV1().ResourceClaims(w.name)
	group, ctx := errgroup.WithContext(w.ctx)
	group.SetLimit(writers)
	for i := range claims {
		group.Go(func() error {
			claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("claim-%04d", i)}, Spec: spec(w.exactly("gpu", 1))}
			_, err := client.Create(ctx, claim, metav1.CreateOptions{})
			return err
		})
	}
	w.must(group.Wait(), "creating %d claims", claims)

	account := localcluster.SchedulerServiceAccount
	identity, err := own.ServiceAccountConfig(w.ctx, account.Namespace, account.Name, nil)
	w.must(err, "getting the scheduler's identity")
	identity.ContentType, identity.AcceptContentTypes = runtime.ContentTypeJSON, runtime.ContentTypeJSON // for withoutEventsOf
	last := fmt.Sprintf("claim-%04d", claims-1)
	startScheduler(t, w.name, schedulerSetup{
		identity: identity,
		wrap:     func(next http.RoundTripper) http.RoundTripper { return withoutEventsOf(last, next) },
		edit: func(c *schedulerconfig.KubeSchedulerConfiguration) {
			for _, p := range c.Profiles[len(c.Profiles)-1].PluginConfig {
				if args, ok := p.Args.(*config.DeviceClaimsArgs); ok {
					args.AuditPeriod.Duration = time.Second
				}
			}
		},
	})
	w.awaitClaimEvent(last, "AccountDiffers", "what the scheduler knows of the claim differs from the API (missing)")
	events, err := own.AdminClient().CoreV1().Events(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing events")
	for _, e := range events.Items {
		if e.InvolvedObject.Name != last {
			t.Errorf("a false alarm: %s of %s: %s", e.Reason, e.InvolvedObject.Name, e.Message)
		}
	}
}

// startCrowdedCluster starts a control plane in which nothing but the scheduler looks at claims.
func startCrowdedCluster(t *testing.T) *localcluster.Cluster {
	t.Helper()
	own, err := localcluster.Start(t.Context(), localcluster.Options{
		Progress: os.Stderr, ControllerManagerArgs: []string{"--controllers=serviceaccount-controller"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			own.Keep()
		}
		if err := own.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := own.Apply(t.Context(), filepath.Join(manifests, "base/access")); err != nil {
		t.Fatal(err)
	}
	return own
}

// withoutEventsOf drops from the watches of ResourceClaims, which must be of JSON, all events of the claims with the name.
func withoutEventsOf(claim string, next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		response, err := next.RoundTrip(request)
		if err == nil && strings.HasSuffix(request.URL.Path, "/resourceclaims") && request.URL.Query().Get("watch") != "" {
			response.Body = &droppingBody{body: response.Body, values: json.NewDecoder(response.Body), dropped: []byte(`"name":"` + claim + `"`)}
		}
		return response, err
	})
}

// droppingBody is a body of JSON values without those that contain something.
type droppingBody struct {
	body    io.Closer
	values  *json.Decoder
	dropped []byte
	rest    []byte // of the value that is being read
}

func (b *droppingBody) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		var value json.RawMessage
		if err := b.values.Decode(&value); err != nil {
			return 0, err
		}
		if !bytes.Contains(value, b.dropped) {
			b.rest = value
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *droppingBody) Close() error { return b.body.Close() }
