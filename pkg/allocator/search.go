package allocator

import "context"

func decide(ctx context.Context, in Input, keep bool) Result { return Result{} }
