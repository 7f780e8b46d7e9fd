from quintnet_compiler import *
